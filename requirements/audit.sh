#!/usr/bin/env bash
# Known vulnerabilities in what the image adds and is built with (docker.txt, docker-build.txt, kernels.txt) and, with --venv, in the development
# environment. Asks a vulnerability service, so it needs a network that reaches one: SERVICE=osv (default) or pypi.
#
# OSV_URL names another OSV service than https://api.osv.dev/v1/query, IGNORE another list than audit-ignore.txt.
# Exit 0: nothing known beyond the ignored. 1: something is. 2: the service could not be asked, which says nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
audit=${PIP_AUDIT:-.venv/bin/pip-audit}
service=${SERVICE:-osv}

ignored=()
while read -r id _; do
  [[ -z $id || $id == \#* ]] || ignored+=(--ignore-vuln "$id")
done < "${IGNORE:-requirements/audit-ignore.txt}"
options=(--strict --progress-spinner off --disable-pip --vulnerability-service "$service")
[[ -z ${OSV_URL:-} ]] || options+=(--osv-url "$OSV_URL")

# --strict: a package that the service does not know is no clean package.
check() {
  local name=$1 answer
  shift
  echo "audit of $name by $service:"
  if answer=$("$audit" "${options[@]}" "${ignored[@]}" "$@" 2>&1); then
    echo "$answer"
  elif grep -q '^Found [0-9]* known vulnerabilit' <<<"$answer"; then
    echo "$answer"
    return 1
  else
    tail -n 1 <<<"$answer"
    echo "audit.sh: the audit could not be made: no answer from $service. Run it where the network reaches it." >&2
    exit 2
  fi
}

found=0
for lock in requirements/docker.txt requirements/docker-build.txt requirements/kernels.txt; do
  check "$lock" --require-hashes --requirement "$lock" || found=1
done
if [[ ${1:-} == --venv ]]; then
  installed=$(mktemp)
  trap 'rm -f "$installed"' EXIT
  "$(dirname "$audit")/pip" freeze --exclude-editable | grep '==' >"$installed" # what comes from a file has no entry there
  check "the environment" --no-deps --requirement "$installed" || found=1
fi
exit "$found"

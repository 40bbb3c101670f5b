#!/usr/bin/env bash
# Regenerate docker.txt and docker-build.txt: pinned versions with hashes for Python 3.10 to 3.12 on Linux.
# Needs `uv` (`make venv` installs it into .venv/bin) and the package index.
set -euo pipefail
cd "$(dirname "$0")/.."

skip=()
while read -r name; do
  [[ -z $name || $name == \#* ]] || skip+=(--no-emit-package "$name")
done < requirements/docker-base.txt

compile() {
  local target=$1
  shift
  uv pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-annotate \
    --custom-compile-command "requirements/lock-docker.sh" --output-file "$target.tmp" "$@"
  mv "$target.tmp" "$target"
}

compile requirements/docker-build.txt requirements/docker-build.in
compile requirements/docker.txt --extra bench --extra eval --extra scale "${skip[@]}" pyproject.toml

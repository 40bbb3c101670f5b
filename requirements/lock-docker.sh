#!/usr/bin/env bash
# Regenerate docker.txt, docker-build.txt and kernels.txt: pinned versions with hashes on Linux, for Python 3.10 to 3.12, and
# for the stage that compiles the kernels from 3.11 on.
# Needs `uv` (`make venv` installs it into .venv/bin) and the package index.
set -euo pipefail
cd "$(dirname "$0")/.."

skip=()
while read -r name; do
  [[ -z $name || $name == \#* ]] || skip+=(--no-emit-package "$name")
done < requirements/docker-base.txt

compile() { # TARGET PYTHON ARGUMENT...
  local target=$1 python=$2
  shift 2
  uv pip compile --quiet --universal --python-version "$python" --generate-hashes --no-annotate \
    --custom-compile-command "requirements/lock-docker.sh" --output-file "$target.tmp" "$@"
  mv "$target.tmp" "$target"
}

compile requirements/docker-build.txt 3.10 requirements/docker-build.in
compile requirements/docker.txt 3.10 --extra bench --extra eval --extra smg "${skip[@]}" pyproject.toml
# torch pins a Triton of its own; the kernels were proved with the one of serve-cpu.txt.
triton=$(mktemp)
trap 'rm -f "$triton"' EXIT
grep '^triton==' requirements/serve-cpu.txt > "$triton"
compile requirements/kernels.txt 3.11 --extra serve --extra kernels -c requirements/constraints.txt --overrides "$triton" \
  pyproject.toml "$triton"

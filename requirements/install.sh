#!/usr/bin/env bash
# Sets up the virtual environment of the Makefile; one that was stopped goes on where it was.
#
#   requirements/install.sh [FOLDER]      default .venv; PYTHON names the interpreter it is made with
#
# uv installs, with downloads in parallel. PyTorch comes first and alone: its CPU build from PyTorch's own index, or, where
# that cannot be reached, whatever pip is configured to find. Nothing after it can replace it (constraints.txt).
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
python=${PYTHON:-python3}
needed_gb=7  # 5 installed, and what uv unpacks on the way
newest=(sglang==0.5.23 transformers==5.19.0 tokenizers==0.23.2 xgrammar==0.2.7 openai==2.8.0)  # as its own metadata pins them
aiter=(amd-aiter==0.1.7.post2.dev18 pybind11)  # compiled nowhere; the image's own is newer

die() { # WHAT REMEDY
  echo "install: $1: $2" >&2
  exit 1
}

free_gb() { df -Pk "$(dirname "$venv")" | awk 'NR == 2 { print int($4 / 1024 / 1024) }'; }

# One line a step; its output is shown only when it fails, after the reason in one line where that can be told.
step() { # TEXT COMMAND...
  local text=$1 log started=$SECONDS
  log=$(mktemp)
  shift
  if ! "$@" > "$log" 2>&1; then
    tail -n 15 "$log" >&2
    local why
    why=$(cat "$log")
    rm -f "$log"
    if grep -qiE 'no space left|os error 28|disk quota' <<< "$why"; then
      die "the disk is full" "make room (about $needed_gb GB in all), then \`make venv\` goes on"
    elif grep -qiE 'dns error|name or service|name resolution|error sending request|connection|timed out' <<< "$why"; then
      die "the package index cannot be reached" "with a network (or a proxy, or an index in pip's configuration) \`make venv\` goes on"
    fi
    die "$text failed" "the lines above say why; \`make venv\` goes on"
  fi
  rm -f "$log"
  echo "install: $text ($((SECONDS - started)) s)"
}

[[ $(uname -sm) == "Linux x86_64" && ! -e /lib/ld-musl-x86_64.so.1 ]] ||
  die "this is $(uname -sm), or without glibc" "Linux x86-64 with glibc is needed: docker build -f launch/docker/cpu.Dockerfile ."
if [[ ! -x $venv/bin/uv ]]; then
  "$python" -c '' 2> /dev/null || die "no $python here" "apt-get install python3 python3-venv"
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  # 3.11 is tried, for 3.12 all packages are there; Triton 3.9 has none for 3.10, outlines-core 0.1.26 none for 3.13.
  [[ $version =~ ^3\.1[12]$ ]] || die "$python is Python $version" "3.11 or 3.12 is needed: make PYTHON=python3.11"
  "$python" -c 'import ensurepip, venv' 2> /dev/null || die "$python has no module venv" "apt-get install python$version-venv"
  command -v g++ > /dev/null || die "no C++ compiler (g++)" "apt-get install g++"
  (($(free_gb) >= needed_gb)) || die "$(free_gb) GB are free here" "make room: $needed_gb GB are needed"
  "$python" -m venv "$venv"
  step "installer" "$venv/bin/pip" install --retries 1 uv==0.13.9
fi
export VIRTUAL_ENV=$PWD/$venv
[[ $venv != /* ]] || VIRTUAL_ENV=$venv
uv=$venv/bin/uv
# A mirror that pip is told to use is uv's, too.
mirror=${PIP_INDEX_URL:-$("$venv/bin/pip" config get global.index-url 2> /dev/null || true)}
[[ -z $mirror ]] || export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$mirror}

mapfile -t torch < <(grep -E '^torch(vision)?==' requirements/constraints.txt)
sglang=$(grep '^sglang==' requirements/constraints.txt)
if ! "$uv" pip install --offline --dry-run --no-deps "${torch[@]}" 2>&1 | grep -q 'Would make no changes'; then
  if UV_HTTP_RETRIES=0 UV_HTTP_CONNECT_TIMEOUT=5 "$uv" pip install --quiet --dry-run --torch-backend=cpu "${torch[@]}" 2> /dev/null; then
    step "PyTorch's CPU build" "$uv" pip install --torch-backend=cpu "${torch[@]}"
  else
    echo "install: PyTorch's CPU index cannot be reached; taking the build that pip is configured to find"
    step "PyTorch" "$venv/bin/pip" install --retries 1 "${torch[@]}"
  fi
fi
folder=$("$venv/bin/python" -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')
echo "install: torch $(sed -n "s/^__version__ = '\(.*\)'/\1/p" "$folder/version.py"), $(du -sh "$folder" | cut -f1)"

# SGLang's own metadata pins GPU-only packages, so it comes without dependencies beside the part of them that a CPU needs.
# The CUDA build of torch pins a Triton of its own, which nothing here uses.
step "what SGLang and the extras need" "$uv" pip install -c requirements/constraints.txt -r requirements/serve-cpu.txt \
  --overrides <(grep '^triton==' requirements/serve-cpu.txt) -r pyproject.toml --all-extras 'setuptools>=77'
step "SGLang ${sglang#*==}" "$uv" pip install --no-deps "$sglang"
step "SGLang ${newest[0]#*==} beside it, for its tests" "$uv" pip install --no-deps \
  --target "$venv/compat/${newest[0]/==/-}" "${newest[@]}"
step "AITER's files, for theirs" "$uv" pip install --no-deps --target "$venv/compat/amd-aiter" "${aiter[@]}"
step "this package" "$uv" pip install --no-deps --no-build-isolation --editable .
# Once for all that import it at the same time later: compiling is two thirds of a first import.
step "what an engine imports, compiled" env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 "$venv/bin/python" -c \
  'import os, sys; from kimi_w4a8_eagle3.engine.fork_server import ForkServer as F; F.start(sys.executable, os.environ, 2).close()'

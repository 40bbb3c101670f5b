#!/usr/bin/env bash
# Sets up the virtual environment of the Makefile in two stages. An interrupted installation goes on where it stopped.
#
#   requirements/install.sh demo|test|releases [FOLDER]      default .venv
#
# `demo` installs what `make demo` and `serve tiny` need; `test` adds the compilers, extras and second releases of the tests,
# `releases` the releases of SGLang that only `make releases` tests.
# PYTHON names the interpreter, by default python3. If it is not Python 3.11, 3.12 or 3.13, one of those that is on the PATH is
# taken, or uv looks for 3.12 or downloads it.
# TORCH_BACKEND=cuda accepts PyTorch's CUDA build where no CPU build can be found.
# Exit code 3: this machine can get no suitable Python, or no CPU build of PyTorch for it. 1: anything else.
set -euo pipefail
cd "$(dirname "$0")/.."
stage=${1:-}
venv=${2:-.venv}
python=${PYTHON:-python3}
backend=${TORCH_BACKEND:-cpu}
pip=("$venv/bin/pip")
uv_release=uv==0.13.9
newest=(sglang==0.5.23 transformers==5.19.0 tokenizers==0.23.2 xgrammar==0.2.7 openai==2.8.0 anthropic==2.14.0)  # as its own metadata pins the first four
between=("sglang==0.5.21 xgrammar==0.2.7" "sglang==0.5.22 transformers==5.19.0 tokenizers==0.23.2 xgrammar==0.2.7")
aiter=(amd-aiter==0.1.7.post2.dev18 pybind11)  # compiled nowhere; the image's own is newer

die() { # WHAT REMEDY [CODE]
  echo "install: $1: $2" >&2
  exit "${3:-1}"
}

# One line a step: its name and size when it begins, its seconds when it ends. Its output is shown only when it fails,
# before one line with the reason where the output tells it.
step() { # TEXT COMMAND...
  local text=$1 log started=$SECONDS
  log=$(mktemp)
  shift
  printf 'install: %s ...' "$text"
  if ! "$@" > "$log" 2>&1; then
    echo
    tail -n 15 "$log" >&2
    local why
    why=$(cat "$log")
    rm -f "$log"
    if grep -qiE 'no space left|os error 28|disk quota' <<< "$why"; then
      die "the disk is full" "make room (about $needed_gb GB in all), then the same command goes on"
    elif grep -qiE 'dns error|name or service|name resolution|error sending request|connection|timed out' <<< "$why"; then
      die "the package index cannot be reached" "with a network (or a proxy, or an index in pip's configuration) the same command goes on"
    fi
    die "${text%%,*} failed" "the lines above say why; the same command goes on"
  fi
  rm -f "$log"
  echo " $((SECONDS - started)) s"
}

check_machine() {
  [[ $(uname -sm) == "Linux x86_64" && ! -e /lib/ld-musl-x86_64.so.1 ]] ||
    die "this is $(uname -sm), or without glibc" "Linux x86-64 with glibc is needed: docker build -f launch/docker/cpu.Dockerfile ."
  command -v g++ > /dev/null || die "no C++ compiler (g++)" "apt-get install g++"
  command -v lscpu > /dev/null || die "no program lscpu, which SGLang runs" "apt-get install util-linux"
  local free_gb installed_gb=0
  free_gb=$(df -Pk "$(dirname "$venv")" | awk 'NR == 2 { print int($4 / 1024 / 1024) }')
  [[ ! -d $venv ]] || installed_gb=$(du -sk "$venv" | awk '{ print int($1 / 1024 / 1024) }')
  ((free_gb + installed_gb >= needed_gb)) || die "$free_gb GB are free here" "make room: $((needed_gb - installed_gb)) GB are needed"
}

pip_setting() { # NAME: from pip's variables or its configuration files
  local variable=PIP_${1^^}
  variable=${variable//-/_}
  echo "${!variable:-$("${pip[@]}" config get "global.$1" 2> /dev/null || true)}"
}

# uv reads no configuration of pip's: a mirror, a folder of wheels or a certificate that pip is told to use is uv's, too.
use_pip_settings() {
  local index links cert
  cert=$(pip_setting cert)
  index=$(pip_setting index-url)
  links=$(pip_setting find-links)
  [[ -z $cert ]] || export SSL_CERT_FILE=${SSL_CERT_FILE:-$cert}
  [[ -z $index ]] || export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index}
  [[ -z $links ]] || export UV_FIND_LINKS=${UV_FIND_LINKS:-${links// /,}}
}

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null; } # PYTHON

# Triton 3.9 has no wheel for 3.10, and 3.14 was not tried.
fit() { [[ $1 =~ ^3\.1[123]$ ]]; } # VERSION

choose_python() {
  local other
  version=$(version_of "$python") || version=
  if fit "$version" || fit "${python##*/python}"; then return; fi
  for other in python3.12 python3.13 python3.11; do
    if fit "$(version_of "$other")"; then
      echo "install: $python is ${version:-missing}, so $other is taken"
      python=$other version=${other#python}
      return
    fi
  done
}

# True if another Python than that of the environment is named before PyTorch is there, for example after a refused CUDA build.
names_another() { [[ ! -d $(echo "$venv"/lib/python3*/site-packages/torch) ]] && fit "$version" && [[ $version != "$(version_of "$venv/bin/python")" ]]; }

make_environment() {
  local base=3.12 found=$python uv
  [[ -n $version ]] || found=python3

  # uv is a package: a Python's pip installs it into a folder first, and it goes into the environment that it makes then.
  # A Python without pip gets a temporary environment with one, which takes four seconds.
  if "$found" -c 'import pip' 2> /dev/null; then
    pip=("$found" -m pip)
  elif "$found" -c 'import ensurepip, venv' 2> /dev/null; then
    "$found" -m venv "$temporary/venv"
    pip=("$temporary/venv/bin/pip")
  fi
  if [[ ${pip[0]} != "$venv/bin/pip" ]]; then
    # Both settings of pip refuse what follows, which changes nothing outside of the folder.
    step "installer" env PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 "${pip[@]}" install --retries 1 --target "$temporary/uv" "$uv_release"
    uv=$temporary/uv/bin/uv
  elif ! uv=$(command -v uv); then
    "$found" -c '' 2> /dev/null || die "no $python here" "apt-get install python3 python3-venv"
    die "$found has no module venv" "apt-get install python3-venv"
  fi
  use_pip_settings

  if fit "$version"; then
    step "environment" "$uv" venv --allow-existing --python "$(command -v "$python")" "$venv"
  else
    ! fit "${python##*/python}" || base=${python##*/python}
    [[ -n $version ]] && found="$python is Python $version" || found="no $python here"
    UV_HTTP_RETRIES=0 "$uv" venv --quiet --allow-existing --python "$base" "$venv" 2> /dev/null ||
      die "$found, and uv cannot get Python $base" "install Python 3.11, 3.12 or 3.13 and name it: make PYTHON=python3.12" 3
  fi
  step "pip and uv for $("$venv/bin/python" -V)" "$uv" pip install --python "$venv/bin/python" pip "$uv_release"
}

# PyTorch comes before everything else: its CPU build from PyTorch's own index or, where that cannot be reached, the build
# that pip is configured to find. Nothing after it can replace it (constraints.txt).
install_torch() {
  local torch options=(--index-strategy unsafe-best-match) plan url  # the best version of all indexes, as pip takes it
  echo "install: looking for a CPU build of PyTorch"
  mapfile -t torch < <(grep -E '^torch(vision)?==' requirements/constraints.txt)
  if uv_pip --offline --dry-run --no-deps "${torch[@]}" 2>&1 | grep -q 'Would make no changes'; then return; fi
  if [[ $backend == cpu ]] && UV_HTTP_RETRIES=0 UV_HTTP_CONNECT_TIMEOUT=5 uv_pip --dry-run --torch-backend=cpu "${torch[@]}" 2> /dev/null; then
    options+=(--torch-backend=cpu)
  else
    for url in $(pip_setting extra-index-url); do options+=(--index "$url"); done
    plan=$(uv_pip "${options[@]}" --dry-run "${torch[@]}" 2>&1) || true  # the step below says what is wrong
    if [[ $backend != cuda ]] && grep -qE '^ \+ (cuda|nvidia)-' <<< "$plan"; then ask_for_cuda; fi
  fi
  step "PyTorch, 0.6 GB" uv_pip --no-deps "${options[@]}" "${torch[@]}"
  echo "install: torch $("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))')"
}

ask_for_cuda() {
  local answer=n what
  what="only PyTorch's CUDA build can be had here for $("$venv/bin/python" -V): $cuda_gb GB more on the disk, useless without a GPU"
  [[ ! -t 0 || ! -t 1 ]] || read -rp "install: $what. Install it? [y/N] " answer
  [[ $answer == [yY]* ]] && return
  rm -rf "$venv"  # it holds nothing but uv, and the next command may name another Python
  die "$what" "TORCH_BACKEND=cuda accepts it; with another Python (PYTHON=python3.11) pip may find a CPU build" 3
}

# Static libraries, torch's own tests and Triton's profiler for NVIDIA are a fifth of the demo's installation.
remove_unused() {
  local site
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  find "$site/torch" "$site/triton" "$site/xgrammar" -name '*.a' -delete
  rm -rf "$site/torch/test" "$site"/torch/bin/test_* "$site"/triton/backends/nvidia/lib/cupti*
}

uv_pip() { "$uv" pip install "$@"; }

packages() { # EXTRAS...: what SGLang and this package need
  # SGLang's own metadata pins GPU-only packages, so it comes without dependencies beside the part of them that a CPU needs.
  # The CUDA build of torch pins a Triton of its own, which nothing here uses.
  grep '^triton==' requirements/serve-cpu.txt > "$temporary/overrides.txt"
  uv_pip -c requirements/constraints.txt --overrides "$temporary/overrides.txt" \
    -r requirements/serve-cpu.txt -r pyproject.toml "$@" 'setuptools>=77'
}

case $stage in
  demo) needed_gb=3 ;;
  test) needed_gb=6 ;;
  releases) needed_gb=7 ;;
  *) die "no stage ${stage:-named}" "requirements/install.sh demo|test|releases [FOLDER]" ;;
esac
cuda_gb=4
[[ $backend =~ ^(cpu|cuda)$ ]] || die "TORCH_BACKEND is $backend" "cpu or cuda was expected"
[[ $backend == cpu ]] || needed_gb=$((needed_gb + cuda_gb))
temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
check_machine
echo "install: $stage, up to $needed_gb GB into $venv; if it is interrupted, the same command goes on"
choose_python
[[ ! -d $venv ]] || ! names_another || rm -rf "$venv"  # it holds nothing but uv
[[ -x $venv/bin/uv ]] || make_environment
export VIRTUAL_ENV=$PWD/$venv
[[ $venv != /* ]] || VIRTUAL_ENV=$venv
uv=$venv/bin/uv
use_pip_settings
install_torch

if [[ $stage == demo ]]; then
  sglang=$(grep '^sglang==' requirements/constraints.txt)
  step "what SGLang needs, 1.3 GB" packages --extra serve
  step "SGLang ${sglang#*==}, 0.1 GB" uv_pip --no-deps "$sglang"
  step "this package" uv_pip --no-deps --no-build-isolation --editable . --editable kimi_w4a8_laptop
  step "removing static libraries and profilers" remove_unused
elif [[ $stage == releases ]]; then
  for row in "${between[@]}"; do
    read -ra names <<< "$row"
    step "SGLang ${names[0]#*==} beside it, 0.2 GB" uv_pip --no-deps --target "$venv/compat/${names[0]/==/-}" "${names[@]}"
  done
else
  step "what the tests need, 1.9 GB" packages --all-extras
  step "SGLang ${newest[0]#*==} beside it, 0.2 GB" uv_pip --no-deps --target "$venv/compat/${newest[0]/==/-}" "${newest[@]}"
  step "AITER's files, 0.2 GB" uv_pip --no-deps --target "$venv/compat/amd-aiter" "${aiter[@]}"
  # Once for all workers, which import it at the same time: compiling is two thirds of a first import.
  step "compiling what an engine imports" env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 "$venv/bin/python" -c \
    'import os; from kimi_w4a8_laptop.fork_server import ForkServer as F; F.start(os.environ, 2).close()'
fi

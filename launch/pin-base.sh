#!/usr/bin/env bash
# Pin both images that the Dockerfile builds on by their digests, or move to another base: asks the registry, and writes
# NAME:TAG@sha256:DIGEST into the Dockerfile. It needs the registry, and Docker with buildx or skopeo.
#
#   launch/pin-base.sh [NAME:TAG]      default: the tag that the Dockerfile names now
set -euo pipefail
cd "$(dirname "$0")/.."

# digest NAME:TAG: the registry's digest, or exit.
digest() {
  local found
  if command -v docker >/dev/null; then
    found=$(docker buildx imagetools inspect "$1" --format '{{.Manifest.Digest}}')
  elif command -v skopeo >/dev/null; then
    found=$(skopeo inspect --format '{{.Digest}}' "docker://$1")
  else
    echo "pin-base.sh: neither docker nor skopeo is here to ask the registry" >&2
    return 1
  fi
  if [[ ! $found =~ ^sha256:[0-9a-f]{64}$ ]]; then
    echo "pin-base.sh: the registry gave no digest for $1: $found" >&2
    return 1
  fi
  echo "$found"
}

base=${1:-$(sed -n 's/^ARG BASE_IMAGE=//p' Dockerfile)} kernels=$(sed -n 's/^ARG KERNELS_IMAGE=//p' Dockerfile)
base=${base%@*} kernels=${kernels%@*}
if [[ ! $base =~ ^[A-Za-z0-9./_:-]+:[A-Za-z0-9._-]+$ ]]; then
  echo "pin-base.sh: $base is not NAME:TAG" >&2
  exit 2
fi
base_digest=$(digest "$base")
kernels_digest=$(digest "$kernels")
sed -i "s|^ARG BASE_IMAGE=.*|ARG BASE_IMAGE=$base@$base_digest|; s|^ARG KERNELS_IMAGE=.*|ARG KERNELS_IMAGE=$kernels@$kernels_digest|" Dockerfile
echo "pinned $base@$base_digest and $kernels@$kernels_digest; build the image, then run: launch/docker-run.sh accept"

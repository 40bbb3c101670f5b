#!/usr/bin/env bash
# Pin the base image by its digest, or move to another one: asks the registry, and writes NAME:TAG@sha256:DIGEST into the
# Dockerfile and compose.yaml. It needs Docker with buildx, or skopeo, and the registry.
#
#   launch/pin-base.sh [NAME:TAG]      default: the tag that the Dockerfile names now
set -euo pipefail
cd "$(dirname "$0")/.."
default=$(sed -n 's/^ARG BASE_IMAGE=//p' Dockerfile)
wanted=${1:-${default%@*}}
if [[ ! $wanted =~ ^[A-Za-z0-9./_:-]+:[A-Za-z0-9._-]+$ ]]; then
  echo "pin-base.sh: $wanted is not NAME:TAG" >&2
  exit 2
fi
if command -v docker >/dev/null; then
  digest=$(docker buildx imagetools inspect "$wanted" --format '{{.Manifest.Digest}}')
elif command -v skopeo >/dev/null; then
  digest=$(skopeo inspect --format '{{.Digest}}' "docker://$wanted")
else
  echo "pin-base.sh: neither docker nor skopeo is here to ask the registry" >&2
  exit 1
fi
if [[ ! $digest =~ ^sha256:[0-9a-f]{64}$ ]]; then
  echo "pin-base.sh: the registry gave no digest for $wanted: $digest" >&2
  exit 1
fi
sed -i "s|^ARG BASE_IMAGE=.*|ARG BASE_IMAGE=$wanted@$digest|" Dockerfile
sed -i "s|BASE_IMAGE:-[^}]*}|BASE_IMAGE:-$wanted@$digest}|" launch/compose.yaml
echo "pinned $wanted@$digest; build the image, then run: launch/docker-run.sh accept"

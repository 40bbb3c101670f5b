#!/usr/bin/env bash
# Run a `kimi` command in the image with everything that eight GPUs need:
#
#   launch/docker-run.sh serve --recipe eagle3-opt
#   launch/docker-run.sh doctor
#
# Settings come from the environment: IMAGE, MODELS and RUNS (folders on the host), CONFIG (the record of `kimi trust`),
# API_KEY_FILE and ADMIN_KEY_FILE (docs/door.md), PORT, NAME, DOCKER (docker or podman), DOCKER_ARGS (more arguments),
# HF_TOKEN (for `fetch` only, passed on by name, never printed). --print shows the command only.
set -euo pipefail

IMAGE=${IMAGE:-kimi-w4a8-eagle3}
MODELS=${MODELS:-$HOME/.cache/huggingface}
RUNS=${RUNS:-$PWD/runs}
CONFIG=${CONFIG:-${XDG_CONFIG_HOME:-$HOME/.config}/kimi-w4a8-eagle3}
DOCKER=${DOCKER:-docker}
PORT=${PORT:-9527}
CONTAINER_UID=10001 # of the user in the image

print_only=
if [[ ${1:-} == --print ]]; then
  print_only=1
  shift
fi
if (($# == 0)); then
  echo "usage: docker-run.sh [--print] COMMAND [ARGUMENT...], for example: serve --recipe eagle3-opt" >&2
  exit 2
fi

if [[ -n $print_only ]]; then
  image_id=IMAGE_ID
else
  image_id=$("$DOCKER" image inspect --format '{{.Id}}' "$IMAGE" | sed 's/^sha256://' | cut -c1-12)
fi

# A server reads weights and the record of trusted code; what fetches and records may write them.
access=:ro
gpu=1
case $1 in
  fetch | trust) access='' gpu='' ;;
  route | check | plan | top) gpu='' ;;
  serve) ;;
  *) access='' ;;
esac

# The root file system is read-only, no capability is left: docs/docker.md says what is written where. An added
# capability would be without effect, because Docker gives none to a user that is not root.
args=(
  run --rm --init
  --read-only
  --tmpfs "/tmp:rw,exec,nosuid,nodev,mode=1777,size=16g" # SGLang runs a script from there, compilers build there
  --cap-drop ALL
  --security-opt no-new-privileges:true
  --security-opt seccomp=unconfined # ROCm's debugger and the NUMA binding need calls that the default profile refuses
  --ipc host                        # tensor-parallel ranks share memory; the 64 MiB of a private /dev/shm end at once
  --network host
  --ulimit memlock=-1
  --ulimit stack=67108864
  --ulimit nofile=1048576
  --volume "$MODELS:/models$access"
  --volume "$RUNS:/runs"
  --volume "$RUNS/home-$image_id:/home/kimi" # kernels built at run time, kept for as long as the image is the same
  --volume "$CONFIG:/trust$access"
  --env "HEALTHCHECK_URL=http://127.0.0.1:$((PORT + 1))/live"
)

if [[ -n $gpu ]]; then
  args+=(--device /dev/kfd --device /dev/dri)
  # The container's groups have other numbers than the host's: pass the numbers of the nodes themselves.
  for node in /dev/kfd /dev/dri/renderD128; do
    if [[ -e $node ]]; then
      args+=(--group-add "$(stat -c %g "$node")")
    fi
  done
fi
for kind in API ADMIN; do
  name=${kind}_KEY_FILE
  if [[ -n ${!name:-} ]]; then
    inside=/run/secrets/kimi-${kind,,}-key
    args+=(--volume "${!name}:$inside:ro" --env "KIMI_$name=$inside")
  fi
done
[[ -z ${NAME:-} ]] || args+=(--name "$NAME")
# What serves requests needs nothing of the Hub's, and whoever breaks into it would have the token.
[[ $1 != fetch || -z ${HF_TOKEN:-} ]] || args+=(--env HF_TOKEN)
if [[ -t 0 && -t 1 ]]; then
  args+=(--interactive --tty)
fi
read -r -a more <<<"${DOCKER_ARGS:-}"
args+=("${more[@]}" "$IMAGE" "$@")

if [[ -n $print_only ]]; then
  printf '%q' "$DOCKER"
  printf ' %q' "${args[@]}"
  echo
  exit 0
fi

if [[ -n $gpu && ! -e /dev/kfd ]]; then
  echo "docker-run.sh: /dev/kfd is missing: the amdgpu driver is not loaded on this machine" >&2
  exit 1
fi
mkdir -p "$MODELS" "$RUNS/home-$image_id" "$CONFIG"
for folder in "$MODELS" "$RUNS" "$RUNS/home-$image_id" "$CONFIG"; do
  if ((EUID == 0)) && [[ $(stat -c %u "$folder") == 0 ]]; then
    chown "$CONTAINER_UID" "$folder"
  elif [[ $folder == "$MODELS" || $folder == "$CONFIG" ]] && [[ -n $access ]]; then
    continue # only read
  elif [[ $(stat -c %u "$folder") != "$CONTAINER_UID" && $(stat -c %A "$folder") != ????????w? ]]; then
    echo "docker-run.sh: $folder must be writable for the container's user: sudo chown $CONTAINER_UID $folder" >&2
    exit 1
  fi
done
exec "$DOCKER" "${args[@]}"

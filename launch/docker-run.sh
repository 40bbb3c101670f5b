#!/usr/bin/env bash
# Run a `kimi-w4a8` command in the image with everything that eight GPUs need:
#
#   launch/docker-run.sh serve --recipe agent
#   launch/docker-run.sh doctor
#
# The container runs as the caller, with the caller's folders and Hugging Face cache, and needs no sudo. If root calls it
# (systemd), it runs as the image's user, who becomes the owner of the folders.
#
# --print shows the command and does not run it. Settings come from the environment:
#   IMAGE, NAME, PORT              image, container name, port of the API
#   MODELS, RUNS                   folders on the host
#   CONFIG                         folder with the record of `kimi-w4a8 trust`
#   API_KEY_FILE, ADMIN_KEY_FILE   files with keys (docs/security.md)
#   DOCKER, DOCKER_ARGS            docker or podman; more arguments for it
#   HF_TOKEN                       token for `fetch` only, passed on by name and never printed
set -euo pipefail

IMAGE=${IMAGE:-kimi-w4a8-eagle3}
MODELS=${MODELS:-$HOME/.cache/huggingface}
RUNS=${RUNS:-$PWD/runs}
CONFIG=${CONFIG:-${XDG_CONFIG_HOME:-$HOME/.config}/kimi-w4a8-eagle3}
DOCKER=${DOCKER:-docker}
PORT=${PORT:-9527}
DEV=${DEV:-/dev} # tests use another folder
user=$(id -u):$(id -g)
((EUID != 0)) || user=10001:10001 # of the image

print_only=
if [[ ${1:-} == --print ]]; then
  print_only=1
  shift
fi
if (($# == 0)); then
  echo "usage: docker-run.sh [--print] COMMAND [ARGUMENT...], for example: serve --recipe agent" >&2
  exit 2
fi

# Collect everything that is missing, and report it in one message with one command.
reasons=() commands=()
need() { # WHY COMMAND
  reasons+=("$1")
  commands+=("$2")
}

image_id=IMAGE_ID
if [[ -z $print_only ]]; then
  if answer=$("$DOCKER" image inspect --format '{{.Id}}' "$IMAGE" 2>&1); then
    image_id=$(cut -c1-12 <<<"${answer#sha256:}")
  elif [[ $answer == *"ermission denied"* ]]; then
    need "$DOCKER does not answer user $(id -u); log in again afterwards" "sudo usermod --append --groups docker $(id -u -n)"
  elif [[ $answer == *"o such image"* || $answer == *"not known"* ]]; then
    need "there is no image $IMAGE" "$DOCKER build -t $IMAGE $(dirname "$(dirname "$(realpath "$0")")")"
  else
    need "$DOCKER: $answer" "$DOCKER info"
  fi
fi

# A server only reads the weights and the record of trusted code. `fetch` and `trust` write them.
access=:ro
gpu=1
case $1 in
  fetch | trust) access='' gpu='' ;;
  route | check | plan | top) gpu='' ;;
  serve) ;;
  *) access='' ;;
esac

# The root file system is read-only and all capabilities are dropped. docs/security.md lists the writable paths. Adding a
# capability would have no effect, because Docker grants none to a user other than root.
args=(
  run --rm --init
  --user "$user"
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

# Pass groups by number, because their numbers differ between container and host: the groups of the device nodes, and the
# caller's groups, through which folders can be shared.
groups=()
((EUID == 0)) || read -r -a groups <<<"$(id -G)"
if [[ -n $gpu ]]; then
  args+=(--device "$DEV/kfd" --device "$DEV/dri")
  for node in "$DEV"/kfd "$DEV"/dri/renderD*; do
    [[ ! -e $node ]] || groups+=("$(stat -c %g "$node")")
  done
fi
for group in $(printf '%s\n' "${groups[@]}" | sort -nu); do
  args+=(--group-add "$group")
done
for kind in API ADMIN; do
  name=${kind}_KEY_FILE
  if [[ -n ${!name:-} ]]; then
    inside=/run/secrets/kimi-${kind,,}-key
    args+=(--volume "${!name}:$inside:ro" --env "KIMI_$name=$inside")
  fi
done
[[ -z ${NAME:-} ]] || args+=(--name "$NAME")
# A server does not need the Hub's token, and an attacker who breaks into it could read it.
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

[[ -z $gpu || -e $DEV/kfd ]] || need "$DEV/kfd is missing: the amdgpu driver is not loaded" "sudo modprobe amdgpu"
for file in "${API_KEY_FILE:-}" "${ADMIN_KEY_FILE:-}"; do
  [[ -z $file || -r $file ]] || need "$file cannot be read" "sudo chown $user $(printf %q "$file")"
done

# usable FOLDER r|w: succeed if the container's user can read or write the folder, or the caller can make it.
usable() {
  local folder=$1 mode=$2
  until [[ -e $folder ]]; do
    folder=$(dirname "$folder") mode=w
  done
  if ((EUID == 0)); then
    [[ $(stat -c %u "$folder") =~ ^(0|${user%:*})$ || $mode$(stat -c %A "$folder") == @(r???????r?x|w????????w?) ]]
  else
    [[ -x $folder && -r $folder && ($mode == r || -w $folder) ]]
  fi
}
mode=$([[ -n $access ]] && echo r || echo w)
folders=("$MODELS" "$CONFIG" "$RUNS" "$RUNS/home-$image_id")
unusable=()
usable "$MODELS" "$mode" || unusable+=("$MODELS")
usable "$CONFIG" "$mode" || unusable+=("$CONFIG")
for folder in "$RUNS" "$RUNS/home-$image_id"; do
  usable "$folder" w || { unusable+=("$folder"); break; }
done
if ((${#unusable[@]})); then
  list=$(printf ' %q' "${unusable[@]}")
  need "user ${user%:*} cannot use$list" "sudo mkdir -p$list && sudo chown -R $user$list"
fi
if ((${#reasons[@]})); then
  printf 'docker-run.sh: %s\n' "${reasons[@]}" >&2
  command=$(printf ' && %s' "${commands[@]}")
  echo "docker-run.sh: first run: ${command# && }" >&2
  exit 1
fi
mkdir -p "${folders[@]}"
if ((EUID == 0)); then
  for folder in "${folders[@]}"; do
    [[ $(stat -c %u "$folder") != 0 ]] || chown "$user" "$folder"
  done
fi
exec "$DOCKER" "${args[@]}"

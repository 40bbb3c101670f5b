#!/usr/bin/env bash
# Run a `kimi-w4a8` command in the image with everything that eight GPUs need:
#
#   launch/docker-run.sh serve agent               in the foreground, on loopback
#   launch/docker-run.sh up agent --listen 0.0.0.0 as a service with a key: --as docker (default), compose or systemd
#   launch/docker-run.sh doctor
#
# The container runs as the caller, with the caller's folders and Hugging Face cache, and needs no sudo. If root calls it,
# it runs as the image's user, who becomes the owner of the folders. Folders have the same path in the container as on the
# host (those below /root have /host in front), and so have existing files that an argument names.
#
# --print shows the command and does not run it. Settings come from the environment:
#   IMAGE, NAME, PORT              image, container name, port of the API
#   MODELS, RUNS                   folders on the host; of MODELS only hub/ is mounted
#   CONFIG                         folder with the record of `kimi-w4a8 trust`, and the key that `up` makes
#   API_KEY_FILE, ADMIN_KEY_FILE   files with keys (docs/security.md)
#   DOCKER, DOCKER_ARGS            docker or podman; more arguments for it
#   READY_TIMEOUT                  seconds that `up` waits for the server (3600)
#   HF_TOKEN                       token for `fetch` only, passed on by name and never printed
set -euo pipefail

here=$(dirname "$(realpath "$0")")
user=$(id -u):$(id -g) sudo="sudo "
if ((EUID == 0)); then
  user=10001:10001 sudo='' # of the image, who cannot enter /root
  MODELS=${MODELS:-/var/lib/kimi/models} RUNS=${RUNS:-/var/lib/kimi/runs} CONFIG=${CONFIG:-/var/lib/kimi/config}
fi
IMAGE=${IMAGE:-kimi-w4a8-eagle3}
# Docker takes a relative name for the name of an empty volume.
MODELS=$(realpath -m "${MODELS:-$HOME/.cache/huggingface}")
RUNS=$(realpath -m "${RUNS:-runs}")
CONFIG=$(realpath -m "${CONFIG:-${XDG_CONFIG_HOME:-$HOME/.config}/kimi-w4a8-eagle3}")
DOCKER=${DOCKER:-docker}
PORT=${PORT:-9527}
READY_TIMEOUT=${READY_TIMEOUT:-3600}
DEV=${DEV:-/dev} ETC=${ETC:-/etc} # tests use other folders

usage() {
  echo "docker-run.sh: $1" >&2
  echo "usage: docker-run.sh [--print] COMMAND [ARGUMENT...], for example: serve agent" >&2
  echo "       docker-run.sh [--print] up RECIPE [--listen ADDRESS] [--as docker|compose|systemd] [ARGUMENT of serve...]" >&2
  exit 2
}

print_only=
if [[ ${1:-} == --print ]]; then
  print_only=1
  shift
fi
(($#)) || usage "no command was given"
[[ $PORT =~ ^[0-9]+$ ]] || usage "PORT=$PORT is not a number"

service=
if [[ $1 == up ]]; then
  # shellcheck source=launch/docker/up.sh
  . "$here/docker/up.sh"
  up_options "${@:2}"
  set -- serve "$recipe" --set "host=$listen" --set "port=$PORT" "${more_words[@]}"
fi
for name in API_KEY_FILE ADMIN_KEY_FILE; do
  [[ -z ${!name:-} ]] || printf -v "$name" %s "$(realpath -m "${!name}")"
done

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
    need "there is no image $IMAGE" "$DOCKER build -t $IMAGE $(dirname "$here")"
  else
    need "$DOCKER: $answer" "$DOCKER info"
  fi
fi
home=$RUNS/home-$image_id

# inside PATH: its path in the container. The container's user cannot enter the image's /root.
inside() {
  [[ $1/ == /root/* ]] && echo "/host$1" || echo "$1"
}

# A server only reads the weights and the record of trusted code. `fetch` and `trust` write them.
access=:ro
gpu=1
case $1 in
  fetch | trust) access='' gpu='' ;;
  route | check | plan) gpu='' ;;
  serve) ;;
  *) access='' ;;
esac

# The root file system is read-only and all capabilities are dropped. docs/security.md lists the writable paths. Adding a
# capability would have no effect, because Docker grants none to a user other than root.
args=(
  run --init
  --user "$user"
  --read-only
  --tmpfs "/tmp:rw,exec,nosuid,nodev,mode=1777,size=16g" # SGLang runs a script from there, compilers build there
  --cap-drop ALL
  --security-opt no-new-privileges:true
  --security-opt seccomp=unconfined # ROCm's debugger and the NUMA binding need calls that the default profile refuses
  --ipc host                        # tensor-parallel ranks share memory; the 64 MiB of a private /dev/shm end at once
  --network host
  --env "HF_HOME=$(inside "$MODELS")"
  --env "KIMI_RUNS=$(inside "$RUNS")"
  --env "KIMI_TRUSTED_CODE=$(inside "$CONFIG")/trusted-code.json"
  --env "KIMI_COMMAND=$here/docker-run.sh" # messages of the container name the host's command
  --env "HEALTHCHECK_URL=http://127.0.0.1:$((PORT + 1))/live"
)
# The rest is not for the check before a start, which runs before the folders exist.
own_args=(
  --volume "$MODELS/hub:$(inside "$MODELS")/hub$access" # not the token beside it
  --volume "$RUNS:$(inside "$RUNS")"
  --volume "$home:/home/kimi" # kernels built at run time, kept for as long as the image is the same
  --volume "$CONFIG:$(inside "$CONFIG")$access"
  --workdir "$(inside "$RUNS")"
)
if [[ $service == docker ]]; then
  own_args+=(--detach --restart on-failure:3 --stop-timeout 150) # longer than the drain of `kimi-w4a8 serve`
else
  own_args+=(--rm)
fi

rootless=
if [[ $("$DOCKER" --version 2>/dev/null || true) == *podman* ]]; then
  args+=(--security-opt label=disable)
  ((EUID == 0)) || rootless=1
fi
if [[ -n $rootless ]]; then
  # Without keep-id the caller is the container's root, and nobody owns the folders. A user cannot raise limits.
  args+=(--userns keep-id --group-add keep-groups --ulimit host)
else
  args+=(--ulimit memlock=-1 --ulimit stack=67108864 --ulimit nofile=1048576)
fi

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
if [[ -z $rootless ]]; then
  for group in $(printf '%s\n' "${groups[@]}" | sort -nu); do
    args+=(--group-add "$group")
  done
fi
for kind in API ADMIN; do
  name=${kind}_KEY_FILE
  if [[ -n ${!name:-} ]]; then
    secret=/run/secrets/kimi-${kind,,}-key
    own_args+=(--volume "${!name}:$secret:ro" --env "KIMI_$name=$secret")
  fi
done
[[ -z ${NAME:-} ]] || own_args+=(--name "$NAME")
# A server does not need the Hub's token, and an attacker who breaks into it could read it.
if [[ $1 == fetch ]]; then
  args+=(--env HF_XET_CACHE=/home/kimi/.cache/huggingface/xet)
  if [[ -n ${HF_TOKEN:-} ]]; then
    args+=(--env HF_TOKEN)
  elif [[ -r $MODELS/token && $EUID != 0 ]]; then
    args+=(--volume "$MODELS/token:/run/secrets/hf-token:ro" --env HF_TOKEN_PATH=/run/secrets/hf-token)
  fi
fi
if [[ -t 0 && -t 1 && -z $service ]]; then
  args+=(--interactive --tty)
fi

# Files and folders that an argument names: a path with a slash, or the value of an option.
words=("$1") previous=
for word in "${@:2}"; do
  option='' value=$word
  if [[ $word == --*=* ]]; then
    option=${word%%=*}= value=${word#*=}
  fi
  if [[ -e $value && ($value == */* || -n $option || $previous == -*) ]]; then
    path=$(realpath "$value")
    # A link in RUNS stays one, because `draft switch` exchanges it. Its target is mounted at the same path.
    link=$(realpath "$(dirname "$value")")/$(basename "$value")
    [[ -L $link && $link == "$RUNS"/* && $(inside "$path") == "$path" ]] || link=$path
    value=$(inside "$link")
    case $path/ in
      "$RUNS"/* | "$MODELS"/hub/* | "$CONFIG"/*) ;;
      *) args+=(--volume "$path:$(inside "$path"):ro") ;;
    esac
  fi
  words+=("$option$value")
  previous=$word
done
read -r -a more <<<"${DOCKER_ARGS:-}"
check=("${args[@]}" --rm --tmpfs "/home/kimi:rw,mode=1777" "${more[@]}" "$IMAGE" "${words[@]}" --dry-run)
args+=("${own_args[@]}" "${more[@]}" "$IMAGE" "${words[@]}")

if [[ -n $print_only ]]; then
  printf '%q' "$DOCKER"
  printf ' %q' "${args[@]}"
  echo
  exit 0
fi

[[ -z $gpu || -e $DEV/kfd ]] || need "$DEV/kfd is missing: the amdgpu driver is not loaded" "${sudo}modprobe amdgpu"

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
# Root can read every file, but the container's user is another.
readable() {
  if ((EUID == 0)); then
    [[ $(stat -c %u "$1") == "${user%:*}" || $(stat -c %A "$1") == ???????r* ]]
  else
    [[ -f $1 && -r $1 ]]
  fi
}
for file in "${API_KEY_FILE:-}" "${ADMIN_KEY_FILE:-}"; do
  quoted=$(printf %q "$file")
  if [[ -z $file || ($file == "$CONFIG/api-key" && -n $service && ! -e $file) ]]; then
    continue # `up` makes it
  elif [[ ! -f $file ]]; then
    need "there is no file $file" "(umask 077 && openssl rand -hex 32 >$quoted)$( ((EUID)) || echo " && chown $user $quoted")"
  elif ! readable "$file"; then
    need "$file cannot be read by user ${user%:*}" "${sudo}chown $user $quoted"
  fi
done
mode=$([[ -n $access ]] && echo r || echo w)
folders=("$MODELS/hub" "$CONFIG" "$RUNS" "$home")
unusable=()
usable "$MODELS/hub" "$mode" || unusable+=("$MODELS")
usable "$CONFIG" "$mode" || unusable+=("$CONFIG")
for folder in "$RUNS" "$home"; do
  usable "$folder" w || { unusable+=("$folder"); break; }
done
if ((${#unusable[@]})); then
  list=$(printf ' %q' "${unusable[@]}")
  need "user ${user%:*} cannot use$list" "${sudo}mkdir -p$list && ${sudo}chown -R $user$list"
fi
if [[ -n ${NAME:-} && $service == docker ]] && "$DOCKER" container inspect "$NAME" >/dev/null 2>&1; then
  need "there is a container $NAME" "$DOCKER stop --time 150 $NAME && $DOCKER rm --volumes $NAME"
fi
if [[ -n $service ]]; then
  for port in "$PORT" "$((PORT + 1))"; do
    if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
      need "port $port is in use" "ss --listening --processes --tcp 'sport = :$port'"
    fi
  done
fi
if ((${#reasons[@]})); then
  printf 'docker-run.sh: %s\n' "${reasons[@]}" >&2
  command=$(printf ' && %s' "${commands[@]}")
  echo "docker-run.sh: first run: ${command# && }" >&2
  exit 1
fi
# Before the first file is made, the image checks the recipe and the arguments.
if [[ -n $service ]]; then
  answer=$("$DOCKER" "${check[@]}" 2>&1 >/dev/null) || {
    code=$?
    printf '%s\n' "$answer" >&2
    exit $code
  }
fi
own() { # root gives what it made to the container's user
  ((EUID)) || [[ $(stat -c %u "$1") != 0 ]] || chown "$user" "$1"
}
mkdir -p "${folders[@]}"
for folder in "$MODELS" "${folders[@]}"; do
  own "$folder"
done
[[ -n $service ]] || exec "$DOCKER" "${args[@]}"
start_service

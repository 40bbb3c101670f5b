#!/usr/bin/env bash
# docker-run.sh [--print] COMMAND [ARGUMENT...]
# docker-run.sh [--print] up RECIPE [--listen ADDRESS] [--trust] [ARGUMENT of serve...]
#
# The first form runs one `kimi-w4a8` command in the image with everything that eight GPUs need: serve agent, doctor.
# The second prepares the machine (`prepare`: checks, download, trust in the checkpoints' code), starts `serve` as a
# service with a key, on 127.0.0.1 without --listen, and waits until it is ready. After an interruption, repeat it.
# --trust answers its only question. --print shows the docker command and runs nothing.
#
# The container runs as the caller and needs no sudo. If root calls, it runs as user 10001, who becomes the owner of the
# folders and key files. Settings come from the environment: IMAGE, NAME, PORT, MODELS, RUNS, CONFIG, API_KEY_FILE,
# DOCKER_ARGS, READY_TIMEOUT, those of the Hub (HF_...) and of a proxy. docs/docker.md explains them.
set -euo pipefail
if [[ ${1:-} == @(-h|--help) || "${1:-} ${2:-}" == "up "@(-h|--help) ]]; then
  exec sed -n '1d; /^#/!q; s/^# \{0,1\}//p' "$0"
fi
usage() { fail "$1"$'\nusage: docker-run.sh [--print] COMMAND [ARGUMENT...]; see --help' 2; }
fail() { echo "docker-run.sh: $1" >&2 && exit "${2:-1}"; } # WHY [CODE]
print_only='' up='' started=''
[[ ${1:-} != --print ]] || { print_only=1 && shift; }
(($#)) || usage "no command was given"
user=$(id -u):$(id -g) sudo='sudo '
if ((EUID == 0)); then
  user=10001:10001 sudo=''
  MODELS=${MODELS:-/var/lib/kimi/models} RUNS=${RUNS:-/var/lib/kimi/runs} CONFIG=${CONFIG:-/var/lib/kimi/config}
fi
[[ -n ${HOME:-} || (-n ${MODELS:-} && -n ${CONFIG:-}) ]] || usage "HOME is not set; set it, or MODELS and CONFIG"
# Docker takes a relative name for the name of an empty volume.
MODELS=$(realpath -m "${MODELS:-${HOME:-}/.cache/huggingface}") RUNS=$(realpath -m "${RUNS:-runs}")
CONFIG=$(realpath -m "${CONFIG:-${XDG_CONFIG_HOME:-${HOME:-}/.config}/kimi-w4a8-eagle3}")
here=$(dirname "$(realpath "$0")") IMAGE=${IMAGE:-kimi-w4a8-eagle3} PORT=${PORT:-9527} DEV=${DEV:-/dev} # tests set DEV
[[ $PORT =~ ^[1-9][0-9]{0,4}$ && $PORT -lt 65535 ]] || usage "PORT=$PORT is not a port below 65535"
if [[ $1 == up ]]; then
  up=1 recipe=${2:-} listen=127.0.0.1 trust=
  [[ -n $recipe && $recipe != -* ]] || usage "up needs a recipe"
  shift 2
  while [[ ${1:-} == --@(listen|trust) ]]; do
    [[ $1 == --trust ]] && trust=$1 || { listen=${2:-} && shift; }
    shift || usage "--listen needs a value"
  done
  [[ " $*" != *" "@(--host|--port|--ops-|host=|port=)* ]] ||
    usage "up takes its address from --listen and its ports from PORT, not from: $*"
  NAME=${NAME:-kimi-${recipe//[^A-Za-z0-9_.-]/-}} API_KEY_FILE=${API_KEY_FILE:-$CONFIG/api-key}
  prepare=(prepare "$recipe" $trust --set "port=$PORT" "$@")
  set -- serve "$recipe" --set "host=$listen" --set "port=$PORT" "$@"
fi
[[ $1 != @(doctor|ready) || " $* " == *" --port"[\ =]* ]] || set -- "$@" --port "$PORT"

reasons='' first='' # everything that is missing comes in one message with one command
need() { reasons+="docker-run.sh: $1"$'\n' first+=" && $2"; } # WHY COMMAND
# may r|w PATH: succeed if the container's user has this right to the path, or gets it: root gives away its own.
may() {
  local right=$1 path=$2
  until [[ -e $path ]]; do path=$(dirname "$path") right=w; done
  [[ $EUID != 0 && -r $path && ($right == r || -w $path) ]] ||
    [[ $EUID == 0 && $(stat -c "%u $right%A" "$path") == @(0 *|10001 *|* r???????r*|* w????????w?) ]]
}

# The root file system is read-only and all capabilities are dropped. docs/security.md lists the writable paths. Adding
# a capability would have no effect, because Docker grants none to a user other than root.
args=(
  run --init --read-only --user "$user" --cap-drop ALL --security-opt no-new-privileges:true
  --security-opt seccomp=unconfined # ROCm's debugger and the NUMA binding need calls that the default profile refuses
  --ipc host --network host         # ranks share memory; the 64 MiB of a private /dev/shm end at once
  --tmpfs "/tmp:rw,exec,nosuid,nodev,mode=1777,size=16g" # compilers build and load there
  --log-driver local --ulimit memlock=-1 --ulimit stack=67108864 --ulimit nofile=1048576
  --env "HF_HOME=$MODELS" --env "KIMI_RUNS=$RUNS" --env "KIMI_TRUSTED_CODE=$CONFIG/trusted-code.json"
  --env "KIMI_COMMAND=$here/docker-run.sh" # messages of the container name the host's command
  --env "HEALTHCHECK_URL=http://127.0.0.1:$((PORT + 1))/live"
)
# Pass groups by number, because their numbers differ between container and host: those of the device nodes, and the
# caller's, through which folders can be shared.
groups=$( ((EUID == 0)) || id -G)
if [[ $1 != @(fetch|trust|check|plan) ]]; then
  args+=(--device "$DEV/kfd" --device "$DEV/dri")
  [[ -e $DEV/kfd ]] || need "$DEV/kfd is missing: no amdgpu driver is loaded" "${sudo}modprobe amdgpu"
  groups+=" $(stat -c %g "$DEV"/kfd "$DEV"/dri/renderD* 2>/dev/null || true)"
fi
for group in $(tr " " "\n" <<<"$groups" | sort -nu); do args+=(--group-add "$group"); done
for name in {https,http,no}_proxy {HTTPS,HTTP,NO}_PROXY HF_ENDPOINT HF_HUB_DISABLE_XET HF_HUB_OFFLINE; do
  [[ $1 == serve || -z ${!name:-} ]] || args+=(--env "$name") # a server needs no network
done
if [[ $1 == @(fetch|prepare) ]]; then # others do not need the Hub's token, and who breaks into a server could read it
  args+=(--env HF_TOKEN --env HF_XET_CACHE=/home/kimi/.cache/huggingface/xet)
  token=$(realpath -m "${HF_TOKEN_PATH:-$MODELS/token}")
  [[ -z ${HF_TOKEN_PATH:-} || -f $token ]] || usage "HF_TOKEN_PATH=$token is not a file"
  [[ -n ${HF_TOKEN:-} || ! -f $token ]] || ! may r "$token" ||
    args+=(--volume "$token:/run/secrets/hf-token:ro" --env HF_TOKEN_PATH=/run/secrets/hf-token)
fi
[[ -n $up || ! -t 0 || ! -t 1 ]] || args+=(--interactive --tty)
# Files and folders that an argument names: a path with a slash, or the value of an option.
words=() previous=
for word in "$@"; do
  option='' value=$word
  [[ $word != --*=* ]] || { option=${word%%=*}= && value=${word#*=}; }
  if [[ -e $value && ($value == */* || -n $option || $previous == -*) ]]; then
    path=$(realpath "$value") value=$(realpath -s "$value")
    # A link in RUNS stays one, because `draft switch` exchanges it; its target is mounted at its own path.
    [[ $value == "$RUNS"/* ]] || value=$path
    [[ $path/ == @("$RUNS"|"$MODELS/hub"|"$CONFIG")/* || " ${args[*]} " == *" $path:$path:ro "* ]] ||
      args+=(--volume "$path:$path:ro")
  fi
  words+=("$option$value") previous=$word
done
read -r -a more <<<"${DOCKER_ARGS:-}"
# Before the first file is made, the image checks recipe and arguments. Volumes and key files do not exist then.
check=("${args[@]}" --rm --tmpfs "/home/kimi:rw,mode=1777" "${more[@]}" "$IMAGE" "${words[@]}" --dry-run)

image_id=IMAGE_ID access=''
! answer=$(docker image inspect --format '{{.Id}}' "$IMAGE" 2>&1) || image_id=${answer#sha256:}
home=$RUNS/home-${image_id::12} # kernels built at run time, kept for as long as the image is the same
[[ $1 != serve ]] || access=:ro # a server only reads weights and the record of trusted code
args+=(
  --volume "$MODELS/hub:$MODELS/hub$access" --volume "$CONFIG:$CONFIG$access" # of MODELS not the token
  --volume "$RUNS:$RUNS" --workdir "$RUNS" --volume "$home:/home/kimi"
)
key=''
if [[ -n ${API_KEY_FILE:-} ]]; then
  key=$(realpath -m "$API_KEY_FILE") secret=/run/secrets/api_key_file
  args+=(--volume "$key:$secret:ro" --env "KIMI_API_KEY_FILE=$secret")
  if [[ ! -f $key && (-z $up || $key != "$CONFIG/api-key") ]]; then # `up` makes that one
    need "there is no file $key" "(umask 077 && openssl rand -hex 32 >$(printf %q "$key"))"
  elif [[ -f $key ]] && ! may r "$key"; then
    need "$key cannot be read by user ${user%:*}" "${sudo}chown $user $(printf %q "$key")"
  fi
fi
[[ -z ${NAME:-} ]] || args+=(--name "$NAME")
# The stop timeout is longer than the drain of `kimi-w4a8 serve`, and the driver `local` keeps at most 100 MB of log.
[[ -n $up ]] && args+=(--detach --label "port=$PORT" --restart on-failure:3 --stop-timeout 150) || args+=(--rm)
args+=("${more[@]}" "$IMAGE" "${words[@]}")
[[ -z $print_only ]] || { printf '%q ' docker "${args[@]}" && echo && exit; }

if [[ $answer == *"ermission denied"* ]]; then
  need "docker refuses user $(id -u); log in again afterwards" "sudo usermod --append --groups docker $(id -u -n)"
elif [[ $image_id == IMAGE_ID ]]; then
  need "there is no image $IMAGE: $answer" "docker build -t $IMAGE $(dirname "$here")"
fi
serving() { # wait until the container serves, and end
  local log="docker logs --follow $NAME" stop="docker stop --time 150 $NAME && docker rm --volumes $NAME" state
  [[ $listen != 0.0.0.0 ]] || listen=$HOSTNAME # clients cannot connect to this address, nor to ::
  [[ $listen != *:* ]] || listen="[${listen/%::/::1}]"
  printf '%s\n' "address: http://$listen:$PORT/v1" "key:     $key" \
    "ready:   curl -s http://127.0.0.1:$((PORT + 1))/ready" "log:     $log" ${started:+"stop:    $stop"} \
    "waiting until it serves, at most ${READY_TIMEOUT:=3600} s; Ctrl-C ends the waiting only"
  ! docker exec "$NAME" kimi-w4a8 ready --port "$PORT" --timeout "$READY_TIMEOUT" || exit 0
  state=$(docker container inspect --format '{{.State.Status}}, restarts: {{.RestartCount}}' "$NAME" 2>&1)
  docker logs --tail 30 "$NAME" >&2 || true
  [[ -z $started || $state == "running, restarts: 0" ]] || { eval "$stop" &>/dev/null && state="ended and removed"; }
  fail "$NAME does not serve ($state); its last lines are above. Its log and its end: $log; $stop"
}
if [[ -n $up ]]; then
  exec 9<"${HOME:-/}" # a lock on this folder, so that no file is made
  flock --nonblock 9 || fail "another \`up\` runs here; nothing was changed"
  if state=$(docker container inspect --format '{{.Config.Labels.port}} {{.State.Status}}' "$NAME" 2>/dev/null); then
    [[ ${state% *} == "$PORT" ]] || fail "$NAME is there with port ${state% *}, not $PORT; nothing was changed"
    [[ $state != *running ]] || { echo "$NAME runs already; nothing was changed" && serving; }
    need "there is a container $NAME (${state#* }), which does not serve" "docker rm --volumes $NAME"
  fi
  for port in "$PORT" "$((PORT + 1))"; do
    ! (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || need "port $port is in use" "ss -ltp 'sport = :$port'"
  done
fi
folders=("$MODELS/hub" "$CONFIG" "$RUNS" "$home") unusable='' right=${access:+r}
for folder in "${folders[@]}"; do
  [[ ! -e $folder || -d $folder ]] || usage "$folder is not a folder"
  [[ $folder != "$RUNS"* ]] || right=w
  may "${right:-w}" "$folder" || unusable+=" $(printf %q "$folder")"
done
[[ -z $unusable ]] || need "user ${user%:*} cannot use$unusable" \
  "(umask 022 && ${sudo}mkdir -p$unusable) && ${sudo}chown -R $user$unusable"
[[ -z $reasons ]] || { printf %s "$reasons" >&2 && fail "first run: ${first# && }"; }
[[ -z $up ]] || answer=$(docker "${check[@]}" 2>&1 >/dev/null) || { code=$? && echo "$answer" >&2 && exit $code; }
mkdir -p "${folders[@]}"
[[ -z $up || -e $key ]] || (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$key")
((EUID)) || find "$MODELS" "${folders[@]}" ${key:+"$key"} -maxdepth 0 -user root -exec chown "$user" {} +
[[ -n $up ]] || exec docker "${args[@]}"
NAME='' API_KEY_FILE='' "$0" "${prepare[@]}" || exit
docker "${args[@]}" >/dev/null || { docker rm --volumes "$NAME" &>/dev/null; exit 1; }
started=1 && serving

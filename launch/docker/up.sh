# Functions of `launch/docker-run.sh up`, which sources this file: its options, the service that it starts, and the wait for it.
# They use that script's variables.
# shellcheck shell=bash disable=SC2154

# up_options WORD...: set recipe, service, listen and more_words, or exit.
up_options() {
  recipe=${1:-} service=docker listen=127.0.0.1
  [[ -n $recipe && $recipe != -* ]] || usage "up needs a recipe"
  shift
  while [[ ${1:-} == --listen || ${1:-} == --as ]]; do
    [[ -n ${2:-} ]] || usage "$1 needs a value"
    [[ $1 == --as ]] && service=$2 || listen=$2
    shift 2
  done
  [[ $service == @(docker|compose|systemd) ]] || usage "--as $service is unknown"
  [[ $READY_TIMEOUT =~ ^[0-9]+$ ]] || usage "READY_TIMEOUT=$READY_TIMEOUT is not a number of seconds"
  more_words=()
  local word
  for word in "$@"; do
    [[ $word != */* || ! -e $word ]] || word=$(realpath "$word") # a unit starts elsewhere
    more_words+=("$word")
    case $word in
      --host | --host=* | host=* | --port | --port=* | port=* | --ops-*)
        usage "up takes its address from --listen and its ports from PORT, not from $word" ;;
    esac
    [[ $service != systemd || $word != *[[:space:]]* ]] || usage "a unit of systemd takes no argument with a space: $word"
  done
  local pairs at
  read -r -a pairs <<<"${DOCKER_ARGS:-}"
  for ((at = 0; at < ${#pairs[@]}; at += 2)); do
    [[ $service != compose || (${pairs[at]} == --@(env|volume) && -n ${pairs[at + 1]:-}) ]] ||
      usage "DOCKER_ARGS for compose may have --env NAME=VALUE and --volume A:B, not ${pairs[at]}"
  done
  [[ $service != systemd || $EUID == 0 || -n $print_only ]] || usage "--as systemd needs root"
  NAME=${NAME:-kimi-${recipe//[^A-Za-z0-9_.-]/-}}
  API_KEY_FILE=${API_KEY_FILE:-$CONFIG/api-key}
}

# json WORD...: a JSON list for compose, which would fill in $NAME.
json() {
  local word list=()
  for word in "$@"; do
    word=${word//\\/\\\\} word=${word//\"/\\\"}
    list+=("\"${word//\$/\$\$}\"")
  done
  (IFS=,; echo "[${list[*]}]")
}

# option NAME: the values that the docker line has for an option, as a JSON list.
option() {
  local at values=()
  for ((at = 0; at < ${#args[@]} - 1; at++)); do
    [[ ${args[at]} != "$1" ]] || values+=("${args[at + 1]}")
  done
  json "${values[@]}"
}

# compose_file: what compose.yaml lacks: the words of serve, and all that podman, the caller and the settings change.
compose_file() {
  local limits
  limits=$(option --ulimit | sed 's/"host"//; s/=\([-0-9]*\)"/": \1/g; s/^\[/{/; s/\]$/}/')
  printf '{"services": {"serve": {"command": %s, "environment": %s, "volumes": %s, "group_add": %s, "security_opt": %s, ' \
    "$(json "${words[@]}")" "$(option --env)" "$(option --volume)" "$(option --group-add)" "$(option --security-opt)"
  printf '"ulimits": %s%s}}}\n' "$limits" "${rootless:+, \"userns_mode\": \"keep-id\"}"
}

# settings: one file for compose and systemd, which both read it as lines of NAME=value.
settings() {
  local pair
  for pair in "IMAGE=$IMAGE" "NAME=$NAME" "RECIPE=$recipe" "LISTEN=$listen" "PORT=$PORT" "OPS_PORT=$((PORT + 1))" \
    "USER_IDS=$user" "MODELS=$MODELS" "RUNS=$RUNS" "CONFIG=$CONFIG" "RUNS_INSIDE=$(inside "$RUNS")" \
    "API_KEY_FILE=$API_KEY_FILE" "ADMIN_KEY_FILE=${ADMIN_KEY_FILE:-}" "DOCKER=$(command -v "$DOCKER")" \
    "DOCKER_ARGS=${DOCKER_ARGS:-}" "ARGUMENTS=${more_words[*]}"; do
    echo "${pair%%=*}='${pair#*=}'" # both programs take single quotes literally
  done
}

# command_line WORD...: the words as one types them.
command_line() {
  local line
  printf -v line ' %q' "$@"
  echo "${line# }"
}

# start: start the service, and set log and stop to the command lines for it.
start() {
  local file more compose edit
  case $service in
    docker)
      "$DOCKER" "${args[@]}"
      log="$DOCKER logs --follow $NAME" stop="$DOCKER stop --time 150 $NAME && $DOCKER rm --volumes $NAME"
      ;;
    compose)
      file=$CONFIG/$NAME.env more=$CONFIG/$NAME.compose.yaml
      settings >"$file"
      compose_file >"$more"
      compose=("$DOCKER" compose --env-file "$file" --file "$here/compose.yaml" --file "$more")
      "${compose[@]}" up --detach
      log=$(command_line "${compose[@]}" logs --follow) stop=$(command_line "${compose[@]}" down)
      ;;
    systemd)
      mkdir -p "$ETC/kimi" "$ETC/systemd/system"
      settings >"$ETC/kimi/kimi.env"
      edit="/^Doc/s|/opt/kimi-w4a8-eagle3/launch|${here// /%20}|; s|/opt/kimi-w4a8-eagle3/launch|$here|; s|/usr/bin/docker|$(command -v "$DOCKER")|"
      [[ $("$DOCKER" --version) != *podman* ]] || edit+="; s/^After=docker.service /After=/; /^Requires=docker.service/d"
      sed "$edit" "$here/systemd/kimi@.service" >"$ETC/systemd/system/kimi@.service"
      systemctl daemon-reload
      systemctl enable --now "kimi@$recipe"
      log="journalctl --follow --unit kimi@$recipe" stop="systemctl disable --now kimi@$recipe"
      ;;
  esac
}

# ready: succeed if the server answers 200; its phase is in $phase.
ready() {
  local status=
  exec 3<>"/dev/tcp/127.0.0.1/$((PORT + 1))" || return 1
  printf 'GET /ready HTTP/1.0\r\nHost: localhost\r\n\r\n' >&3 # the ops port refuses other names
  IFS= read -r -t 10 status <&3 || true
  [[ ! $(timeout 10 cat <&3) =~ \"phase\":\ ?\"([a-z_ ]+)\" ]] || phase=${BASH_REMATCH[1]}
  exec 3>&-
  [[ $status == *" 200 "* ]]
}

# alive: succeed while the first container runs; a restart means that it failed.
alive() {
  if [[ $service == systemd ]]; then
    [[ $(systemctl show --property ActiveState --property NRestarts "kimi@$recipe") != *@(ActiveState=failed|NRestarts=[1-9])* ]]
  else
    [[ $("$DOCKER" container inspect --format '{{.State.Status}} {{.RestartCount}}' "$NAME" 2>&1) == @(created|running|initialized)" 0" ]]
  fi
}

# start_service: make the key, start, print what an operator needs, and wait until it serves.
start_service() {
  local log stop end phase='' shown=''
  if [[ ! -e $API_KEY_FILE ]]; then
    (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$API_KEY_FILE.new")
    own "$API_KEY_FILE.new"
    mv "$API_KEY_FILE.new" "$API_KEY_FILE"
  fi
  start
  printf '%s\n' "address: http://$listen:$PORT/v1" "key:     $API_KEY_FILE" \
    "ready:   curl -s http://127.0.0.1:$((PORT + 1))/ready" "log:     $log" "stop:    $stop" \
    "waiting until it serves, at most $((READY_TIMEOUT / 60)) minutes; Ctrl-C ends the waiting only"
  until ready 2>/dev/null; do
    if ! alive; then
      end=("$DOCKER" logs --tail 30 "$NAME")
      [[ $service != systemd ]] || end=(journalctl --no-pager --lines 30 --unit "kimi@$recipe")
      "${end[@]}" >&2 || true
      eval "$stop" >/dev/null 2>&1 || true
      echo "docker-run.sh: $NAME ended before it served and was stopped; its last lines are above" >&2
      exit 1
    elif ((SECONDS > READY_TIMEOUT)); then
      echo "docker-run.sh: $NAME does not serve after $READY_TIMEOUT s and still runs. Read its log, then wait or stop it: $log" >&2
      exit 1
    fi
    [[ $phase == "$shown" ]] || echo "$((SECONDS / 60)) min: ${phase}"
    shown=$phase
    sleep 1
  done
  echo "ready"
}

#!/usr/bin/env bash
# Serve the built-in model as the container does (docs/security.md), without Docker. The server runs as uid 10001 with no
# capability, no new privileges and a read-only root file system. It can write to /tmp, /home/kimi and /runs only.
# bubblewrap (a Debian package) makes the namespaces. At the end the script lists the written files.
#
#   launch/check-readonly.sh [ARGUMENT of kimi-w4a8 serve ...]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$PWD/.venv/bin/python}
bin=$(dirname "$python")
interpreter=$("$python" -c 'import sys; print(sys.base_prefix)')
port=$("$python" -c 'from kimi_w4a8_eagle3.engine.process import free_port; print(free_port())')
base=$(mktemp -d)
trap 'rm -rf "$base"' EXIT
mkdir "$base"/{home,runs,models,trust}

# Mount the machine's folders read-only. The folders that the container can write to start empty.
sandbox=(bwrap --unshare-user --uid 10001 --gid 10001 --unshare-pid --unshare-ipc --cap-drop ALL --die-with-parent)
for path in /*; do
  case $path in
    /proc | /dev | /tmp | /home | /runs | /models | /trust) ;;
    *) if [[ -L $path ]]; then
         sandbox+=(--symlink "$(readlink "$path")" "$path")
       else
         sandbox+=(--ro-bind "$path" "$path")
       fi ;;
  esac
done
sandbox+=(
  --proc /proc --dev /dev --tmpfs /tmp
  --ro-bind "$PWD" "$PWD" --ro-bind "$interpreter" "$interpreter"
  --bind "$base/home" /home/kimi --bind "$base/runs" /runs
  --ro-bind "$base/models" /models --ro-bind "$base/trust" /trust
  --remount-ro / --chdir /runs --clearenv
  --setenv PATH "$bin:/usr/bin:/bin" --setenv HOME /home/kimi --setenv HF_HOME /models
  --setenv HF_MODULES_CACHE /home/kimi/.cache/huggingface/modules
  --setenv KIMI_TRUSTED_CODE /trust/trusted-code.json
)

cat >"$base/runs/try.sh" <<'SCRIPT'
set -euo pipefail
port=$1
shift
[[ $(id -u) == 10001 && $(awk '/^Cap(Eff|Bnd|Amb)/ {print $2}' /proc/self/status | sort -u) == 0000000000000000 ]]
grep -q '^NoNewPrivs:.1$' /proc/self/status
for place in / /usr /models /trust; do
  if touch "$place/probe" 2>/dev/null; then
    echo "check-readonly.sh: $place can be written" >&2
    exit 1
  fi
done
kimi-w4a8 serve --recipe tiny --set "port=$port" "$@" >/runs/serve.out 2>&1 &
server=$!
ask() { # ask PORT PATH [BODY]
  python - "$@" <<'PYTHON'
import sys, httpx
port, path, *body = sys.argv[1:]
url = f"http://127.0.0.1:{port}{path}"
kind = {"content-type": "application/json"}
try:
    answer = httpx.post(url, content=body[0], headers=kind, timeout=60) if body else httpx.get(url, timeout=10)
except httpx.HTTPError as error:
    sys.exit(f"{url}: {error}")
print(answer.text[:300])
sys.exit(answer.status_code != 200)
PYTHON
}
until ask $((port + 1)) /ready >/dev/null 2>&1; do
  kill -0 $server 2>/dev/null || { tail -n 20 /runs/serve.out >&2; exit 1; }
  sleep 1
done
ask $((port + 1)) /live >/dev/null
ask "$port" /v1/completions '{"model": "kimi-k2.5-tiny", "prompt": "Tom has 3 apples", "max_tokens": 8}'
ask $((port + 1)) /metrics | grep -q .
echo "written while it served:"
find /tmp /home/kimi /runs /dev/shm -type f | sed -E 's/[0-9a-z_]{8,}(\/|$)/*\1/' | sort | uniq -c
kill -TERM $server
code=0
wait $server || code=$?
[[ $code == 143 ]] || { echo "check-readonly.sh: kimi-w4a8 serve ended with $code" >&2; exit 1; }
SCRIPT
"${sandbox[@]}" bash /runs/try.sh "$port" "$@"
echo "check-readonly.sh: served and stopped with a read-only root, as uid 10001 without capabilities"

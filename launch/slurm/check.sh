#!/usr/bin/env bash
# Proves kimi.sbatch with a real Slurm on this machine: two nodes, both this machine, serve the built-in model.
#
#   apt-get install slurm-wlm; launch/slurm/check.sh
#
# Needs slurmctld, slurmd and `kimi-w4a8`, no root, no running Slurm: everything lies in a temporary folder, on free ports. It
# asks through smg, kills an engine and sees it come back, drains the job with a request under way, and looks for
# what was left behind. It waits for three starts of an engine. KEEP=1 keeps the folder.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
KIMI=${KIMI:-$here/../../.venv/bin/kimi-w4a8}
PROCTRACK=${PROCTRACK:-proctrack/pgid}
for program in slurmctld slurmd sbatch; do
  PATH=$PATH:/usr/sbin command -v "$program" >/dev/null || { echo "check.sh: $program is missing: apt-get install slurm-wlm" >&2; exit 2; }
done
export PATH=$PATH:/usr/sbin
work=$(mktemp -d)
export SLURM_CONF=$work/slurm.conf
step() { echo "== $*"; }
fail() { echo "check.sh: $*" >&2; exit 1; }

free_ports() { python3 - "$1" <<'P'
import socket, sys
sockets = [socket.socket() for _ in range(int(sys.argv[1]))]
for one in sockets:
    one.bind(("127.0.0.1", 0))
print(*(one.getsockname()[1] for one in sockets))
P
}
read -r ctld n1 n2 <<<"$(free_ports 3)"
# Two neighbouring ports for each server and for smg, below the range that the kernel gives away.
smg_port=$((20000 + RANDOM % 5000)) server_port=$((25000 + RANDOM % 5000))

cat >"$SLURM_CONF" <<C
ClusterName=check
SlurmctldHost=localhost
SlurmctldPort=$ctld
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/none
CredType=cred/none
ProctrackType=$PROCTRACK
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
MpiDefault=none
KillWait=30
ReturnToService=2
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool.%n
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.%n.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd.%n.log
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port=$n1 CPUs=2 Gres=gpu:8
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port=$n2 CPUs=2 Gres=gpu:8
PartitionName=all Nodes=n1,n2 Default=YES State=UP
C
# Eight GPUs a node, so that the script's own request is made: Slurm wants devices, nothing opens them.
for number in {0..7}; do ln -s /dev/null "$work/gpu$number"; done
echo "Name=gpu File=$work/gpu[0-7]" >"$work/gres.conf"
mkdir "$work/state" "$work/spool.n1" "$work/spool.n2"
daemons=() job=
clean_up() {
  [[ -z $job ]] || scancel "$job" 2>/dev/null || true
  for _ in {1..100}; do [[ -n $job && -n $(squeue --noheader --jobs="$job" 2>/dev/null) ]] || break; sleep 1; done
  for pid in "${daemons[@]}"; do kill "$pid" 2>/dev/null || true; done
  wait
  if [[ -n ${KEEP:-} ]]; then echo "kept: $work"; else rm -rf "$work"; fi
}
trap clean_up EXIT

step "Slurm $(slurmctld -V | cut -d' ' -f2) with two nodes, $PROCTRACK"
slurmctld -D 2>"$work/daemons.log" &
daemons+=($!)
slurmd -D -N n1 2>>"$work/daemons.log" &
daemons+=($!)
slurmd -D -N n2 2>>"$work/daemons.log" &
daemons+=($!)
for _ in {1..60}; do
  [[ $(sinfo --noheader --format=%t 2>/dev/null | sort -u) == idle ]] && break
  sleep 1
done
sinfo --Node --format='%N %t %c %G'
[[ $(sinfo --noheader --format=%t | sort -u) == idle ]] || { grep error "$work/slurmctld.log"; fail "the nodes are not idle"; }

head -c 24 /dev/urandom | base64 >"$work/key"
chmod 600 "$work/key"
export KIMI RECIPE=tiny SMG_PORT=$smg_port SERVER_PORT=$server_port PORT_STEP=2 LOGS=$work/logs
export KIMI_API_KEY_FILE=$work/key
export OMP_NUM_THREADS=1
job=$(sbatch --parsable --output="$work/job.log" "$here/kimi.sbatch")
step "job $job; waiting for two servers behind smg"
url=http://127.0.0.1:$smg_port
registered() { curl -s --max-time 5 "$url/readiness" | python3 -c 'import json,sys; print(json.load(sys.stdin)["healthy_workers"])' 2>/dev/null || echo 0; }
wait_registered() {
  for _ in {1..200}; do
    [[ $(registered) == "$1" ]] && return
    [[ -n $(squeue --noheader --jobs="$job") ]] || { cat "$work/job.log"; fail "the job ended"; }
    sleep 2
  done
  cat "$work/job.log"
  fail "not $1 servers in time"
}
began=$SECONDS
wait_registered 2
echo "after $((SECONDS - began)) s"

ask() { # ask PROMPT TOKENS [CURL_OPTION...]
  curl -s --max-time 120 "$url/v1/completions" -H "Authorization: Bearer $(cat "$work/key")" -H 'Content-Type: application/json' \
    -d "{\"model\": \"kimi-k2.5-tiny\", \"prompt\": \"$1\", \"max_tokens\": $2, \"temperature\": 0, \"ignore_eos\": true}" "${@:3}"
}
step "a request through smg"
[[ $(ask "Tom has 3 apples" 16 -o "$work/answer" -w '%{http_code}') == 200 ]] || { cat "$work/answer"; fail "no answer"; }
python3 -c 'import json,sys; print(repr(json.load(open(sys.argv[1]))["choices"][0]["text"]))' "$work/answer"
step "the same without the key"
code=$(curl -s -o /dev/null -w '%{http_code}' "$url/v1/completions" -H 'Content-Type: application/json' \
  -d '{"model": "kimi-k2.5-tiny", "prompt": "x", "max_tokens": 1}')
echo "HTTP $code"
[[ $code == 401 ]] || fail "the key was not asked for"

step "kill -9 of the engine on the second node"
victim=$(ss -Hltnp "sport = :$((server_port + 2))" | grep -oP 'pid=\K\d+' | head -1)
kill -9 "$victim"
began=$SECONDS
for _ in {1..60}; do [[ $(registered) == 1 ]] && break; sleep 1; done
[[ $(registered) == 1 ]] || fail "smg did not notice"
[[ $(ask "Tom has 3 apples" 16 -o /dev/null -w '%{http_code}') == 200 ]] || fail "the other server does not answer"
echo "the other one answers; smg knows after $((SECONDS - began)) s"
wait_registered 2
echo "two again after $((SECONDS - began)) s"

step "drain with a streamed answer under way"
curl -sN --max-time 300 "$url/v1/completions" -H "Authorization: Bearer $(cat "$work/key")" -H 'Content-Type: application/json' \
  -d '{"model": "kimi-k2.5-tiny", "prompt": "Tom has 3 apples", "max_tokens": 400, "temperature": 0, "ignore_eos": true,
       "stream": true, "stream_options": {"include_usage": true}}' >"$work/stream" &
stream=$!
for _ in {1..600}; do [[ -s $work/stream ]] && break; sleep 0.1; done
echo "$(grep -c '^data: {' "$work/stream") chunks have come"
scancel --batch --signal=TERM "$job"
began=$SECONDS
wait "$stream" || fail "the answer was cut"
python3 - "$work/stream" <<'P'
import json, pathlib, sys
*chunks, done = [line[6:] for line in pathlib.Path(sys.argv[1]).read_text().splitlines() if line.startswith("data: ")]
tokens = json.loads(chunks[-1])["usage"]["completion_tokens"]
print(len(chunks), "chunks,", tokens, "tokens, then", done)
sys.exit(tokens != 400 or done != "[DONE]")
P
for _ in {1..180}; do [[ -z $(squeue --noheader --jobs="$job") ]] && break; sleep 1; done
echo "the job ended after $((SECONDS - began)) s: $(scontrol show job "$job" --oneliner | grep -oP 'JobState=\S+|ExitCode=\S+' | tr '\n' ' ')"
cat "$work/job.log"

step "what is left"
# All of the job's processes inherit LOGS; the search itself must not.
left=$(env -u LOGS grep -lz "^LOGS=$work/logs" /proc/[0-9]*/environ 2>/dev/null || true)
for environ in $left; do tr '\0' ' ' <"${environ%environ}cmdline" && echo; done
[[ -n $left ]] || echo nothing
[[ -z $left ]] || fail "processes are left"
if grep -rlF "$(cat "$work/key")" "$work/logs" "$work/job.log"; then fail "the key is in a log"; fi
echo "the key is in no log"
step "all as it should be"

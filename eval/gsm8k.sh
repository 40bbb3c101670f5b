#!/bin/sh
# GSM8K in the published protocol against a running server: eval/gsm8k.sh [URL] [--baseline runs/... | --published NAME]
# Without a baseline or a published configuration it measures and does not judge: exit code 6.
url=http://127.0.0.1:9527
case ${1:-} in
  http*) url=$1 && shift ;;
esac
exec "$(dirname "$0")/../launch/kimi.sh" eval gsm8k --base-url "$url" "$@"

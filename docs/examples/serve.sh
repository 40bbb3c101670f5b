#!/bin/sh
# Serve a recipe to clients that know a key: docs/examples/serve.sh [RECIPE] [OPTION of `kimi-w4a8 serve`]...
# RECIPE is `tiny`, the built-in model, by default. The key lies in KEY_FILE, by default ./key, and is made on first use.
set -eu
PATH=$(cd "$(dirname "$0")/../.." && pwd)/.venv/bin:$PATH
key=${KEY_FILE:-key}
[ -e "$key" ] || (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$key")
case ${1:-} in
  '' | -*) set -- tiny "$@" ;;
esac
echo "serve.sh: a client needs the key: OPENAI_API_KEY=\$(cat '$key') python docs/examples/client.py QUESTION" >&2
exec kimi-w4a8 serve --api-key-file "$key" "$@"

#!/bin/sh
# Run the host's `kimi-w4a8`, or the image's on a host that has none.
if command -v kimi-w4a8 >/dev/null; then
  exec kimi-w4a8 "$@"
fi
exec "$(dirname "$0")/docker-run.sh" "$@"

#!/bin/sh
# `kimi` as it is installed on this host; where it is not, the image's.
if command -v kimi >/dev/null; then
  exec kimi "$@"
fi
exec "$(dirname "$0")/docker-run.sh" "$@"

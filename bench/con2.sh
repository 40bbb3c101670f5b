#!/bin/sh
# The published latency point; say --base-url URL or --recipe NAME (see `kimi bench run --help`).
exec kimi bench con2 "$@"

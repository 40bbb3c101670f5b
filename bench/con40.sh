#!/bin/sh
# The published throughput point; say --base-url URL or --recipe NAME (see `kimi bench run --help`).
exec kimi bench con40 "$@"

"""One engine under `kimi-w4a8 serve`: checked before it starts, watched, drained, and started again when it ends."""

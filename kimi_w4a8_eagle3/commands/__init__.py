"""One module per sub-command of `kimi-w4a8`."""

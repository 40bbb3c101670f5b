"""One module per sub-command of `kimi`; each imports its machinery inside its function."""

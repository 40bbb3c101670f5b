"""AMD Quark W4A8 checkpoints: reading the configuration, unpacking INT4, checking files, running the quantizer."""

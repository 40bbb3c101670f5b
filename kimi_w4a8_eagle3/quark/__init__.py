"""AMD Quark W4A8 checkpoints: read the configuration, unpack INT4, check files, run the quantizer."""

"""The model: Quark's quantization config, the W4A8 scheme of MoE layers, and the check of loaded weights."""

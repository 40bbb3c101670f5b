"""Quantization with AMD Quark, one shard at a time."""

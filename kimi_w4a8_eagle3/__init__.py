"""Serve Kimi-K2.5 in W4A8 with EAGLE3 speculation on AMD Instinct MI325X, as an SGLang plugin."""

__version__ = "0.1.0"

"""Benchmarks with SGLang's own load generator, and the figures derived from its output."""

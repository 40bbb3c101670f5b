"""Benchmarks: SGLang's own load generator run as a process, its output parsed, and what is derived from it."""

"""Programs that import sglang: its load generator, and an engine that stores the states of a prefill."""

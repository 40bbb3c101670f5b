"""The modules that import sglang: its load generator and its scheduler, which the planner simulates with."""

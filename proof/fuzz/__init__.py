"""Fuzzing a running engine's HTTP interface, with a healthy client beside it. Needs the extra `dev`."""

"""Accuracy, losslessness, tool calls and smoke tests of a deployment (`kimi-w4a8 eval`)."""

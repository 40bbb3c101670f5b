"""Kimi's chat format: how an answer is read, and ids of tool calls."""

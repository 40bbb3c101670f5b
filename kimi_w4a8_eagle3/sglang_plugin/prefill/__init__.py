"""Prefill: attention's input shared by the ranks."""

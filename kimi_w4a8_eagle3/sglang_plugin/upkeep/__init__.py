"""Upkeep: an engine that outlives failing requests and says how it is."""

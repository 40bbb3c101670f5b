"""Helpers for all other folders; this folder imports nothing else of the package."""

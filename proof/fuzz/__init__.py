"""Hostile requests to a real server: known attacks, and what hypothesis draws from the types in its document."""

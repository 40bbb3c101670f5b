"""Pieces that all measurements share: the server under test, progress, verdicts and data files."""

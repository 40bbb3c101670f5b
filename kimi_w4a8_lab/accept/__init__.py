"""Acceptance of what a machine serves: stages, their results, and a page of what they settle."""

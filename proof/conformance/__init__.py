"""Requests with expectations from the vendors' documents and types, for any server of the three APIs."""

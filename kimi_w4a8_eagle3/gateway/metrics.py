"""Counters of the gateway. Workers share them by prometheus_client's multiprocess mode; the ops endpoint reads them."""

from __future__ import annotations

from prometheus_client import Counter

REQUESTS = Counter("kimi_gateway_requests", "Requests by endpoint and status.", ["endpoint", "status"])
DROPPED = Counter("kimi_gateway_dropped_fields", "Fields that no endpoint reads.", ["field"])
_MOST_NAMES = 64  # different names of dropped fields that are counted: clients choose them
_names: set[str] = set()


def count_dropped(names: list[str]) -> None:
    """Count fields that were dropped."""
    for name in names:
        if name not in _names:
            if len(_names) >= _MOST_NAMES or not (name.isidentifier() and name.isascii() and len(name) <= 60):
                name = "other"
            _names.add(name)
        DROPPED.labels(name).inc()

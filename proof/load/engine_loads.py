"""Requests and KV tokens of an engine, as /v1/loads reports them now; gauges of /metrics rest while it is idle."""

from __future__ import annotations

import httpx

RUNNING, WAITING, USED = "num_running_reqs", "num_waiting_reqs", "num_used_tokens"


def engine_loads(base_url: str, timeout_s: float = 30.0) -> dict[str, int]:
    """Return the sums over an engine's ranks. Raises httpx.HTTPError, ValueError, LookupError or TypeError."""
    answer = httpx.get(f"{base_url}/v1/loads", timeout=timeout_s, trust_env=False).raise_for_status()
    return {name: sum(int(load[name]) for load in answer.json()["loads"]) for name in (RUNNING, WAITING, USED)}

"""Requests and KV tokens of an engine, as /v1/loads reports them now; gauges of /metrics rest while it is idle."""

from __future__ import annotations

import httpx

from kimi_w4a8_eagle3.base.http import Address, bearer

RUNNING, WAITING, USED = "num_running_reqs", "num_waiting_reqs", "num_used_tokens"


def engine_loads(engine: Address, timeout_s: float = 30.0) -> dict[str, int]:
    """Return the sums over an engine's ranks. Raises httpx.HTTPError, ValueError, LookupError or TypeError."""
    answer = httpx.get(
        f"{engine.url}/v1/loads", headers=bearer(engine.key), timeout=timeout_s, trust_env=False
    ).raise_for_status()
    return {name: sum(int(load[name]) for load in answer.json()["loads"]) for name in (RUNNING, WAITING, USED)}

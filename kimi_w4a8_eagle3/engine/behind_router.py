"""Find the engines behind a router. A measurement needs their settings and counters, which the router does not report.

The ops endpoint of `kimi-w4a8 serve --replicas` and `kimi-w4a8 route` has them. Written for sglang-router 0.3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from ..base.errors import KimiError
from ..base.tls import trusted
from .client import bearer

_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class RoutedEngines:
    """Engines behind a router.

    ops_url: endpoint with the counters of all replicas. replica_url: one ready replica. replicas: number of ready ones.
    """

    ops_url: str
    replica_url: str
    replicas: int


def behind_router(base_url: str, ops_url: str | None = None, api_key: str | None = None) -> RoutedEngines | None:
    """Return the engines behind the router at `base_url`, or None if that is not a router.

    ops_url: by default the port after the router's. Raises KimiError when it does not answer, or no replica is ready.
    """
    if "router_manager" not in _json(f"{base_url}/get_server_info", bearer(api_key)):
        return None
    place = urlsplit(base_url)
    ops_url = ops_url or f"{place.scheme}://{place.hostname}:{(place.port or 80) + 1}"
    replicas = _json(f"{ops_url}/status").get("replicas")
    if replicas is None:
        raise KimiError(
            f"{base_url} is a router, and the ops endpoint with its engines' counters does not answer",
            where=ops_url,
            expected="the ops endpoint of `serve --replicas` or `route`, by default the port after the API's",
            remedy="give its address with --ops-url, or measure one engine at its own address",
        )
    ready = [str(replica["base_url"]) for replica in replicas if replica.get("ready")]
    if not ready:
        raise KimiError(
            "no replica behind this router is ready", where=f"{ops_url}/status", remedy="wait; /status shows why"
        )
    return RoutedEngines(ops_url, ready[0], len(ready))


def _json(url: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
    """Return the JSON object at `url`, or an empty one on any failure."""
    try:
        found = httpx.get(url, headers=headers, timeout=_TIMEOUT_S, verify=trusted()).json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return {}
    return found if isinstance(found, dict) else {}

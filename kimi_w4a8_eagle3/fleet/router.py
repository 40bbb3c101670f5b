"""SGLang's router as a child process, and a small client of its control plane."""

from __future__ import annotations

import json
import secrets
import sys
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from ..base.http import http_url, trusted
from ..engine.process import EngineServer, free_port
from ..recipe.router_settings import RouterSettings
from .run_router import ARGUMENTS

_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class RouterEndpoint:
    """Address of a router and the key of its control plane.

    control_key: new for every router and known only to this process, so that clients cannot add or remove replicas. The
    router knows no client keys. It passes the Authorization header on to the replicas' doors. A key that it knew, it
    would add to every request of any client.
    """

    host: str
    port: int
    metrics_port: int = field(default_factory=free_port)
    control_key: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)

    @property
    def base_url(self) -> str:
        """Address at which a client on this machine reaches the router."""
        return http_url(self.host, self.port)

    @property
    def metrics_url(self) -> str:
        """The router's own Prometheus endpoint, on loopback."""
        return f"http://127.0.0.1:{self.metrics_port}/metrics"


def router_process(
    endpoint: RouterEndpoint, settings: RouterSettings, log_path: Path, drain_timeout_s: float = 0.0
) -> EngineServer:
    """Return the router's process, not started; after SIGTERM it finishes its requests for `drain_timeout_s`."""
    arguments = settings.router_arguments() | {
        "host": endpoint.host,
        "port": endpoint.port,
        "prometheus_host": "127.0.0.1",
        "prometheus_port": endpoint.metrics_port,
        "shutdown_grace_period_secs": max(1, round(drain_timeout_s)),
        "control_plane_api_keys": [["fleet", "kimi", endpoint.control_key, "admin"]],
    }
    return EngineServer(
        command=[sys.executable, "-m", "kimi_w4a8_eagle3.fleet.run_router"],
        env={ARGUMENTS: json.dumps(arguments)},
        host=endpoint.host,
        port=endpoint.port,
        log_path=log_path,
        name="router",
    )


class RouterControl:
    """The router's list of replicas. Every method raises httpx.HTTPError when the router does not answer."""

    def __init__(self, endpoint: RouterEndpoint) -> None:
        self._http = httpx.Client(
            base_url=endpoint.base_url,
            timeout=_TIMEOUT_S,
            headers={"Authorization": f"Bearer {endpoint.control_key}"},
            verify=trusted(),
        )

    def workers(self) -> dict[str, str]:
        """Return the ids of the replicas that are registered now, by their base URLs."""
        answer = self._http.get("/workers")
        answer.raise_for_status()
        return {str(entry["url"]): str(entry["id"]) for entry in answer.json()["workers"]}

    def add(self, url: str) -> None:
        """Request the registration of a replica; the router lists it a moment later."""
        self._http.post("/workers", json={"url": url}).raise_for_status()

    def remove(self, worker: str) -> None:
        """Stop sending new requests to the replica with this id; its running requests continue."""
        self._http.delete(f"/workers/{worker}").raise_for_status()

    def close(self) -> None:
        self._http.close()

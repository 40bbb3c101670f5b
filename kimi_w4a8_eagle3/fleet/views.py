"""Views of a single engine and of a router alone, for probes and metrics. `supervisor.Fleet` is a view, too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..engine.client import EngineClient
from ..ops.canary import CanaryWatch
from ..ops.replica_state import FleetView, Phase, ReplicaState
from ..recipe.schema import Options
from .checks import ServeOptions
from .registrar import Registrar
from .router import RouterEndpoint


@dataclass(frozen=True)
class SingleServer:
    """View of one engine without a router, for probes and metrics."""

    recipe: str
    state: ReplicaState
    router_url: str | None = None
    router_metrics_url: str | None = None

    def replicas(self) -> Sequence[ReplicaState]:
        return [self.state]

    def live(self) -> tuple[bool, str]:
        """Return False when the engine is gone. A stalled one may recover until the watchdog ends it."""
        return self.state.phase is not Phase.DOWN, self.state.reason


@dataclass(frozen=True)
class RouterOnly:
    """View of a router whose replicas run elsewhere, with probes of their own."""

    recipe: str
    registrar: Registrar
    endpoint: RouterEndpoint
    known: dict[str, ReplicaState] = field(default_factory=dict)

    @property
    def router_url(self) -> str | None:
        return self.endpoint.base_url

    @property
    def router_metrics_url(self) -> str | None:
        return self.endpoint.metrics_url

    def replicas(self) -> Sequence[ReplicaState]:
        """Return one state per replica that was ever registered, so that a lost one stays visible."""
        registered = self.registrar.registered()
        for url in sorted(registered - self.known.keys()):
            self.known[url] = ReplicaState(url.removeprefix("http://"), url, progress_timeout_s=0)
        for url, state in self.known.items():
            if state.ready != (url in registered):
                state.enter(*((Phase.READY, "registered") if url in registered else (Phase.DOWN, "not registered")))
        return [self.known[url] for url in sorted(self.known)]

    def live(self) -> tuple[bool, str]:
        return True, ""


@contextmanager
def observed(options: ServeOptions, port: int, view: FleetView, key: str | None = None) -> Iterator[None]:
    """Run probes, metrics and the repeated canary of a server at `port` inside the block."""
    ops_port = options.ops_beside(port)
    if not ops_port:
        yield
        return
    from ..ops.endpoint import OpsServer  # its web server is an optional package

    # A router alone knows no replica at first and never a recipe.
    timeout_s = max((state.progress_timeout_s for state in view.replicas()), default=Options().progress_timeout_s)

    def connect(base_url: str) -> EngineClient:
        return EngineClient(base_url, key, timeout_s)

    with OpsServer(options.ops_host, ops_port, view) as ops, CanaryWatch(view, ops.acceptance, connect):
        yield

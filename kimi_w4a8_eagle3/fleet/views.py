"""Views of a single engine and of a router alone, and the endpoint that shows a view."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from ..engine.client import EngineClient
from ..ops.canary import CanaryWatch
from ..ops.replica_state import FleetView, Phase, ReplicaState
from ..recipe.schema import Options
from .checks import ServeOptions
from .registrar import Registrar
from .router import RouterEndpoint


def single_view(recipe: str, state: ReplicaState) -> FleetView:
    """View of one engine. It is live until it is gone: the watchdog decides whether to end a stalled one."""
    return FleetView(recipe, lambda: [state], lambda: (state.phase is not Phase.DOWN, state.reason))


def router_view(registrar: Registrar, endpoint: RouterEndpoint) -> FleetView:
    """View of a router whose replicas run elsewhere and have probes of their own."""
    known: dict[str, ReplicaState] = {}

    def replicas() -> Sequence[ReplicaState]:
        """Return one state per replica that was ever registered, so that a lost one stays visible."""
        registered = registrar.registered()
        for url in sorted(registered - known.keys()):
            known[url] = ReplicaState(url.removeprefix("http://"), url, progress_timeout_s=0)
        for url, state in known.items():
            if state.ready != (url in registered):
                state.enter(*((Phase.READY, "registered") if url in registered else (Phase.DOWN, "not registered")))
        return [known[url] for url in sorted(known)]

    return FleetView("route", replicas, router_url=endpoint.base_url, router_metrics_url=endpoint.metrics_url)


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
    connect = partial(EngineClient, api_key=key, timeout_s=timeout_s)
    with OpsServer(options.ops_host, ops_port, view) as ops, CanaryWatch(view, ops.acceptance, connect):
        yield

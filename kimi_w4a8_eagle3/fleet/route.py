"""Route to replicas that run elsewhere, in the foreground for `kimi-w4a8 route`."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence

from rich.console import Console

from ..base.installed import require
from ..base.run_dir import EventLog
from ..ops.replica_state import FleetView, Phase, ReplicaState
from ..recipe.router_settings import RouterSettings
from .checks import ServeOptions, require_ports
from .registrar import RouterKeeper
from .router import RouterEndpoint
from .serve import Terminated, observed, signals_raise

_LOST_S = 3600.0  # for which a replica that is gone is shown


def route_foreground(
    host: str,
    port: int,
    model: str | None,
    router: RouterSettings,
    discover: Callable[[], frozenset[str]],
    options: ServeOptions,
) -> int:
    """Route to replicas that run elsewhere until a signal arrives; return the exit code of `kimi-w4a8 route`."""
    console = Console(stderr=True, highlight=False)
    require("sglang_router")
    require_ports(options, host, port)
    facts = {"router": router.model_dump(), "host": host, "port": port, "model": model}
    events = EventLog.begin("route", "", {}, {}, options.runs, console, **facts)
    folder = events.folder
    keeper = RouterKeeper(RouterEndpoint(host, port), router, discover, events, model, options.drain_timeout_s)
    try:
        with signals_raise(drain=True), keeper, observed(options, port, router_view(keeper)):
            console.print(f"[bold]kimi-w4a8: routing at {keeper.endpoint.base_url}/v1[/]; log: {folder}")
            try:
                threading.Event().wait()
            except Terminated as ended:
                if ended.number == signal.SIGTERM:
                    keeper.drain()
                raise
    except Terminated as stopped:
        console.print(f"kimi-w4a8: {stopped} received; the router was stopped; the replicas still run; log: {folder}")
        return stopped.exit_code
    return 0


def router_view(router: RouterKeeper) -> FleetView:
    """View of a router whose replicas run elsewhere and have probes of their own."""
    known: dict[str, ReplicaState] = {}

    def replicas() -> Sequence[ReplicaState]:
        """Return one state per replica, so that a lost one stays visible; not for ever, as pods get new addresses."""
        registered = router.registrar.registered()
        for url in [url for url, state in known.items() if not state.ready and time.time() - state.since > _LOST_S]:
            del known[url]
        for url in sorted(registered - known.keys()):
            known[url] = ReplicaState(url.removeprefix("http://"), url, progress_timeout_s=0)
        for url, state in known.items():
            if state.ready != (url in registered):
                state.enter(*((Phase.READY, "registered") if url in registered else (Phase.DOWN, "not registered")))
        return [known[url] for url in sorted(known)]

    endpoint = router.endpoint
    return FleetView("route", replicas, router_url=endpoint.base_url, router_metrics_url=endpoint.metrics_url)

"""Serve engines, or route to engines elsewhere, in the foreground for `kimi-w4a8 serve` and `kimi-w4a8 route`."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

from rich.console import Console

from ..base.extras import require
from ..base.signals import Terminated, signals_raise
from ..engine.client import EngineClient
from ..engine.process import require_free_port
from ..ops.canary import CanaryWatch
from ..ops.replica_state import FleetView, Phase, ReplicaState
from ..recipe.launch import Launch
from ..recipe.router_settings import RouterSettings
from ..recipe.schema import Options
from .checks import ServeOptions, require_ops
from .events import EventLog
from .placement import replica_launches
from .replica import Replica
from .router import router_endpoint
from .supervisor import Fleet, RouterKeeper, ready_urls


def serve_foreground(front: Launch, options: ServeOptions) -> int:
    """Serve a checked launch until a signal arrives; return the exit code of `kimi-w4a8 serve`.

    Several replicas run on loopback behind the router at the launch's address. One that ends or stalls is restarted,
    and so is the router. SIGHUP restarts the replicas one after the other. A single engine has no router, its log
    appears on stdout, and its end raises KimiError. No process stays behind.
    """
    console = Console(stderr=True, highlight=False)
    launches = replica_launches(front)
    alone = len(launches) == 1
    labels = [front.name] if alone else [f"replica-{number}" for number in range(len(launches))]
    servers = dict(zip(labels, launches, strict=True))
    events = EventLog.begin("serve", front.name, servers, front.env, options.runs, console)
    logs = [events.folder / "server.log"] if alone else [events.folder / f"{label}.log" for label in labels]
    replicas = [
        Replica(launch, log, events, str(number), label, options.drain_timeout_s)
        for number, (log, (label, launch)) in enumerate(zip(logs, servers.items(), strict=True))
    ]
    router = None
    if not alone:
        settings = front.recipe.router.resolved(front.recipe.prefix_cache)
        router = RouterKeeper(router_endpoint(front.host, front.port), settings, partial(ready_urls, replicas), events)
    fleet = Fleet(front.name, replicas, events, router)
    where = logs[0] if alone else events.folder
    console.print(f"kimi-w4a8: {len(launches)} engines of {front.name}; logs: {where}")
    try:
        with (
            signals_raise(drain=True, on_hangup=None if alone else fleet.renew.set),
            router or nullcontext(),
            observed(options, front.port, fleet.view, front.door.api_key),
            follow(logs[0]) if alone else nullcontext(),
        ):
            if not alone:
                console.print(
                    f"[bold]kimi-w4a8: {len(replicas)} replicas of {front.name} behind {front.base_url}/v1[/]"
                )
            fleet.run()
    except Terminated as stopped:
        console.print(f"kimi-w4a8: {stopped} received; all engines and the router were stopped; logs: {where}")
        return stopped.exit_code
    return 0


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
    require_free_port(host, port)
    require_ops(options, port)
    facts = {"router": router.model_dump(), "host": host, "port": port, "model": model}
    events = EventLog.begin("route", "", {}, {}, options.runs, console, **facts)
    folder = events.folder
    keeper = RouterKeeper(router_endpoint(host, port), router, discover, events, model, options.drain_timeout_s)
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
        """Return one state per replica that was ever registered, so that a lost one stays visible."""
        registered = router.registrar.registered()
        for url in sorted(registered - known.keys()):
            known[url] = ReplicaState(url.removeprefix("http://"), url, progress_timeout_s=0)
        for url, state in known.items():
            if state.ready != (url in registered):
                state.enter(*((Phase.READY, "registered") if url in registered else (Phase.DOWN, "not registered")))
        return [known[url] for url in sorted(known)]

    endpoint = router.endpoint
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


@contextmanager
def follow(path: Path, write: Callable[[str], object] = sys.stdout.write) -> Iterator[None]:
    """Copy what is appended to a log to stdout while the block runs."""
    done = threading.Event()

    def copy() -> None:
        with path.open(errors="replace") as file:
            while True:
                ended = done.is_set()
                for line in file:
                    write(line)
                sys.stdout.flush()
                if ended:
                    return
                done.wait(0.2)

    def copy_while_possible() -> None:
        with suppress(OSError):  # stdout may be a file on a full disk; the log itself continues
            copy()

    thread = threading.Thread(target=copy_while_possible, name="log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(timeout=5.0)

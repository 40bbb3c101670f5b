"""Run one engine, or several behind the router, in the foreground for `kimi-w4a8 serve` and `kimi-w4a8 route`."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console

from ..base.extras import require
from ..base.signals import Terminated, signals_raise
from ..engine.process import require_free_port
from ..recipe.launch import Launch
from ..recipe.router_settings import RouterSettings
from .checks import ServeOptions, require_ops
from .events import EventLog
from .placement import replica_launches
from .registrar import Registrar
from .replica import Replica
from .router import router_endpoint
from .supervisor import Fleet, RouterKeeper
from .views import observed, router_view, single_view


def serve_foreground(launch: Launch, options: ServeOptions) -> int:
    """Serve a checked launch until its engine ends or a signal arrives; return the exit code of `kimi-w4a8 serve`.

    With several replicas they run on loopback, behind the router at the launch's address. Leaves no process behind,
    however it ends, and prints where the logs are.
    """
    return _serve_one(launch, options) if launch.recipe.options.replicas == 1 else _serve_fleet(launch, options)


def _serve_one(launch: Launch, options: ServeOptions) -> int:
    console = Console(stderr=True, highlight=False)
    name = launch.recipe.name
    events = EventLog.begin("serve", name, {name: launch}, launch.env, options.runs, console)
    log = events.folder / "server.log"
    log.touch()
    console.print(f"kimi-w4a8: log of the engine: {log}")
    replica = Replica(launch, log, events, "0", options.drain_timeout_s, name)
    view = single_view(name, replica.state)
    try:
        with signals_raise(drain=True), observed(options, launch.port, view, launch.door.api_key), follow(log):
            replica.serve()
    except Terminated as stopped:
        console.print(f"kimi-w4a8: {stopped} received; the engine was stopped; log: {log}")
        return stopped.exit_code
    return 0


def _serve_fleet(front: Launch, options: ServeOptions) -> int:
    """Serve replicas behind the router. A replica that ends or stalls is restarted, and so is the router.

    SIGHUP restarts the replicas one after the other.
    """
    console = Console(stderr=True, highlight=False)
    launches = replica_launches(front)
    servers = {f"replica-{number}": launch for number, launch in enumerate(launches)}
    events = EventLog.begin("serve", front.name, servers, front.env, options.runs, console)
    folder = events.folder
    console.print(f"kimi-w4a8: logs of engines and router: {folder}")
    replicas = [
        Replica(launch, folder / f"replica-{number}.log", events, str(number), options.drain_timeout_s)
        for number, launch in enumerate(launches)
    ]
    endpoint = router_endpoint(front.host, front.port)
    fleet = Fleet(front.name, replicas, endpoint, events)
    router = front.recipe.router.resolved(front.recipe.prefix_cache)
    try:
        with (
            signals_raise(drain=True, on_hangup=fleet.renew.set),
            RouterKeeper(endpoint, router, folder, events),
            fleet.registrar,
            observed(options, front.port, fleet.view, front.door.api_key),
        ):
            console.print(f"[bold]kimi-w4a8: {len(replicas)} replicas of {front.name} behind {endpoint.base_url}/v1[/]")
            fleet.run()
    except Terminated as stopped:
        console.print(f"kimi-w4a8: {stopped} received; all engines and the router were stopped; logs: {folder}")
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
    endpoint = router_endpoint(host, port)
    registrar = Registrar(endpoint, discover, events, model)
    try:
        with (
            signals_raise(drain=True),
            RouterKeeper(endpoint, router, folder, events, options.drain_timeout_s) as keeper,
            registrar,
            observed(options, port, router_view(registrar, endpoint)),
        ):
            console.print(f"[bold]kimi-w4a8: routing at {endpoint.base_url}/v1[/]; log: {folder}")
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

"""Serve the engines of a recipe in the foreground: kept running, restarted one by one, drained together.

One engine is a fleet of one: it has no router, and the fleet ends with it instead of starting it again. SIGTERM drains,
SIGINT ends at once, SIGHUP renews.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

from rich.console import Console

from ..base.errors import KimiError
from ..base.run_dir import EventLog
from ..door.settings import is_loopback
from ..engine.client import EngineClient
from ..engine.process import free_port
from ..ops.replica_state import FleetView, Phase, ReplicaState, canaries
from ..recipe.launch import Launch, missing_gpus
from ..recipe.schema import Options
from .checks import ServeOptions, renewed
from .registrar import RouterKeeper
from .replica import READY_TIMEOUT_S, Replica, Stalled, keep
from .router import RouterEndpoint

MAX_FAILED_STARTS = 5  # in a row, of one of several replicas
_POLL_S = 0.25
_REMOVAL_S = 30.0


def serve_foreground(front: Launch, options: ServeOptions) -> int:
    """Serve a checked launch until a signal arrives; return the exit code of `kimi-w4a8 serve`.

    Several replicas run on loopback behind the router at the launch's address. One that ends or stalls is restarted,
    and so is the router. SIGHUP restarts the replicas one after the other. A single engine has no router, its log
    appears on stdout unless that is a terminal, and its end raises KimiError. No process stays behind.
    """
    console = Console(stderr=True, highlight=False)
    launches = replica_launches(front)
    alone = len(launches) == 1
    labels = [front.name] if alone else [f"replica-{number}" for number in range(len(launches))]
    servers = dict(zip(labels, launches, strict=True))
    described = {label: launch.described() for label, launch in servers.items()}
    events = EventLog.begin("serve", front.name, described, front.env, options.runs, console)
    logs = [events.folder / "server.log"] if alone else [events.folder / f"{label}.log" for label in labels]
    replicas = [
        Replica(launch, log, events, str(number), label, options.drain_timeout_s)
        for number, (log, (label, launch)) in enumerate(zip(logs, servers.items(), strict=True))
    ]
    router = None
    if not alone:
        settings = front.recipe.router.resolved(front.recipe.prefix_cache)

        def ready() -> frozenset[str]:
            return frozenset(replica.state.base_url for replica in replicas if replica.state.ready)

        router = RouterKeeper(RouterEndpoint(front.host, front.port), settings, ready, events)
    fleet = Fleet(front.name, replicas, events, router, partial(renewed, preflight=options.preflight))
    where = logs[0] if alone else events.folder
    engines = "1 engine" if alone else f"{len(launches)} engines"
    console.print(f"kimi-w4a8: {engines} of {front.name}; logs: {where}", soft_wrap=True)
    try:
        with (
            signals_raise(drain=True, on_hangup=None if alone else fleet.renew.set),
            router or nullcontext(),
            observed(options, front.port, fleet.view, front.door.api_key),
            follow(logs[0]) if alone and not sys.stdout.isatty() else nullcontext(),
        ):
            if not alone:
                console.print(
                    f"[bold]kimi-w4a8: {len(replicas)} replicas of {front.name} behind {front.base_url}/v1[/]"
                )
            fleet.run()
    except Terminated as stopped:
        ended = "the engine was" if alone else "all engines and the router were"
        console.print(f"kimi-w4a8: {stopped} received; {ended} stopped; logs: {where}", soft_wrap=True)
        return stopped.exit_code
    return 0


def replica_launches(front: Launch) -> list[Launch]:
    """Return the launches of the recipe's replicas; `front` holds the address and settings that clients see.

    A single one is `front` itself. One of several differs from it by its GPUs, its address and its door. The NUMA list
    stays, because SGLang looks a GPU up by its number on the machine, not by its rank. Raises KimiError when there are
    too few GPUs.
    """
    if front.recipe.options.replicas == 1:
        return [front]
    gpus = front.tensor_parallel if front.machine.devices and front.recipe.hardware.gpus else 0
    if gpus and (missing := missing_gpus(front.recipe, front.machine)):
        remedy = "start fewer replicas, or run several nodes behind `kimi-w4a8 route`"
        raise KimiError(missing, "--replicas", remedy=remedy)
    return [_replica(front, number * gpus, gpus) for number in range(front.recipe.options.replicas)]


def _replica(front: Launch, first: int, gpus: int) -> Launch:
    args = {**front.args, "host": "127.0.0.1", "port": free_port()}
    if gpus:
        args["base-gpu-id"] = first
    env = {**front.env, "KIMI_DOOR": "closed"}  # only the router needs to reach it
    if is_loopback(front.host):  # without a key, /generate is open behind the router as it is without a router
        env["KIMI_DOOR_NATIVE"] = {**os.environ, **env}.get("KIMI_DOOR_NATIVE") or "keyless"
    return replace(front, args=args, env=env, door=replace(front.door, policy="closed"))


class Fleet:
    """The replicas of one machine, and the router in front of several. view: for probes and metrics.

    renewed: returns a launch with its checkpoints as they are now, or raises KimiError.
    """

    def __init__(
        self,
        recipe: str,
        replicas: Sequence[Replica],
        events: EventLog,
        router: RouterKeeper | None = None,
        renewed: Callable[[Launch], Launch] = lambda launch: launch,
    ) -> None:
        addresses = () if router is None else (router.endpoint.base_url, router.endpoint.metrics_url)
        self.view = FleetView(recipe, self.replicas, self.live, *addresses)
        self.renew = threading.Event()  # set it to restart all replicas, one after the other
        self._replicas = replicas
        self._events = events
        self._registrar = None if router is None else router.registrar
        self._renewed = renewed
        self._max_failures = 1 if router is None else MAX_FAILED_STARTS
        self._ending = threading.Event()
        self._gave_up: dict[str, Exception] = {}

    def replicas(self) -> Sequence[ReplicaState]:
        return [replica.state for replica in self._replicas]

    def live(self) -> tuple[bool, str]:
        """Return False and the reason once the supervisor gave up on every replica."""
        if len(self._gave_up) < len(self._replicas):
            return True, ""
        error = self._final_error()
        return False, error.what if isinstance(error, KimiError) else repr(error)

    def run(self) -> None:
        """Serve until Terminated is raised in this thread; raise KimiError when no replica starts any more."""
        # Each in its own thread, because a child dies with the thread that started it.
        threads = [threading.Thread(target=self._keep, args=(replica,), daemon=True) for replica in self._replicas]
        for thread in threads:
            thread.start()
        try:
            while self.live()[0]:
                if self.renew.wait(_POLL_S):
                    self.renew.clear()
                    self.rolling_restart()
            raise self._final_error()
        except Terminated as ended:
            if ended.number == signal.SIGTERM:
                self._drain_all(threads)
            raise
        finally:
            self._end_all(threads)

    def rolling_restart(self) -> None:
        """Restart the replicas one after the other; each first leaves the router and finishes its requests.

        Restarts none if the checkpoints have a fault now. Stops at the first replica that does not come back. The
        remaining ones keep their old processes.
        """
        try:
            launches = [self._renewed(replica.launch) for replica in self._replicas]
        except KimiError as error:
            self._events("fleet", "rolling-restart", f"given up: {error.what}")
            return
        if self._registrar is not None:
            self._registrar.admit({str(launch.args.get("weight-version")) for launch in launches})
        self._events("fleet", "rolling-restart", f"{len(self._replicas)} replicas, one after the other")
        for replica, launch in zip(self._replicas, launches, strict=True):
            state = replica.state
            if not state.ready:
                self._events("fleet", "rolling-restart", f"{replica.label} is {state.phase.value}: not restarted")
                continue
            if not any(s.ready for s in self.replicas() if s is not state):
                self._events("fleet", "rolling-restart", "given up: no other replica is ready")
                return
            self._leave_router(replica)
            state.restarts["rolling"] += 1
            replica.launch = launch
            replica.end()
            if not self._wait_back(replica):
                self._events("fleet", "rolling-restart", f"given up: {replica.label} did not come back")
                return
        self._events("fleet", "rolling-restart", "done")

    def _final_error(self) -> Exception:
        """Return the error of the only replica, or of all of them."""
        if len(self._replicas) == 1:
            return self._gave_up[self._replicas[0].label]
        what = f"no replica starts: {MAX_FAILED_STARTS} failures each in a row"
        return KimiError(what, where=str(self._replicas[0].log_path), remedy="read the end of that log")

    def _keep(self, replica: Replica) -> None:
        error = keep(replica, self._ending, self._events, partial(_count, replica), self._max_failures)
        if error is not None:
            self._gave_up[replica.label] = error

    def _routed(self, condition: Callable[[frozenset[str]], bool], timeout_s: float) -> bool:
        """Wait until the replicas that the router lists meet a condition; True without a router."""
        return self._registrar is None or self._registrar.wait_until(condition, timeout_s)

    def _leave_router(self, replica: Replica) -> None:
        """Remove a replica from the router's list and wait until it is gone."""
        url = replica.state.base_url
        replica.state.enter(Phase.DRAINING, "it leaves the router")
        self._routed(lambda urls: url not in urls, _REMOVAL_S)

    def _wait_back(self, replica: Replica) -> bool:
        """Wait until a restarted replica serves again and the router lists it."""
        url = replica.state.base_url
        end = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < end and replica.label not in self._gave_up:
            if replica.state.ready and self._routed(lambda urls: url in urls, _POLL_S):
                return True
            time.sleep(_POLL_S)
        return False

    def _drain_all(self, threads: Sequence[threading.Thread]) -> None:
        """Stop new requests to all replicas, then let the running ones finish."""
        self._ending.set()
        for replica in self._replicas:
            if replica.state.ready:
                replica.state.enter(Phase.DRAINING, "running requests finish")
        self._routed(lambda urls: not urls, _REMOVAL_S)
        for replica in self._replicas:
            if replica.was_ready:
                replica.end()
            else:  # it has no request, and its canary prompts may take minutes
                replica.end_now()
        for thread in threads:
            thread.join()

    def _end_all(self, threads: Sequence[threading.Thread]) -> None:
        self._ending.set()
        alive = [replica for replica, thread in zip(self._replicas, threads, strict=True) if thread.is_alive()]
        if alive:
            with ThreadPoolExecutor(len(alive)) as pool:
                list(pool.map(Replica.end_now, alive))
        for thread in threads:
            thread.join(timeout=30.0)


def _count(replica: Replica, error: Exception) -> None:
    reason = "stalled" if isinstance(error, Stalled) else "ended" if isinstance(error, KimiError) else "error"
    replica.state.restarts[reason] += 1


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
    with OpsServer(options.ops_host, ops_port, view) as ops, canaries(view, ops.acceptance, connect):
        yield


@contextmanager
def follow(path: Path) -> Iterator[None]:
    """Copy a log, which the engine may not have begun yet, to stdout while the block runs."""
    done = threading.Event()

    path.touch(0o600)

    def copy() -> None:
        with suppress(OSError), path.open(errors="replace") as file:  # stdout may be a file on a full disk
            while True:
                ended = done.is_set()
                for line in file:
                    sys.stdout.write(line)
                sys.stdout.flush()
                if ended:
                    return
                done.wait(0.2)

    thread = threading.Thread(target=copy, name="log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(timeout=5.0)


class Terminated(SystemExit):
    """SIGTERM or SIGINT reached this process. Not an `Exception`, because event loops catch those and continue."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.code = self.exit_code = 128 + number
        self.number = number


@contextmanager
def signals_raise(drain: bool = False, on_hangup: Callable[[], None] | None = None) -> Iterator[None]:
    """Turn SIGTERM and SIGINT into Terminated in the main thread, so that every `with` block cleans up.

    A second signal does not interrupt the clean-up. With `drain`, the first SIGTERM begins to drain, and a second
    signal of either kind ends the drain. on_hangup: called on SIGHUP.
    """
    draining = False

    def end(number: int, _: FrameType | None) -> None:
        nonlocal draining
        begins_drain = drain and not draining and number == signal.SIGTERM
        if not begins_drain:
            for ignored in (signal.SIGTERM, signal.SIGINT):
                signal.signal(ignored, signal.SIG_IGN)
        draining = begins_drain
        raise Terminated(number)

    previous = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    if on_hangup is not None:
        previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda *_: on_hangup())
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)

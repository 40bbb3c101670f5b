"""Serve one engine of a recipe in the foreground: SIGTERM drains it, SIGINT ends it, SIGHUP renews it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType

from rich.console import Console

from ..base.run_dir import EventLog
from ..engine.front import Front
from ..ops.canary import watching
from ..ops.state import EngineState
from ..recipe.launch import Launch
from .checks import ServeOptions
from .supervisor import Supervisor

_POLL_S = 0.25


def serve_foreground(launch: Launch, options: ServeOptions) -> int:
    """Serve a checked launch until a signal arrives; return the exit code of `kimi-w4a8 serve`.

    The engine's log appears on stdout unless that is a terminal. An engine that does not start raises KimiError. No
    process stays behind.
    """
    console = Console(stderr=True, highlight=False)
    described = {launch.name: launch.described()}
    events = EventLog.begin("serve", launch.name, described, launch.env, options.runs, console)
    log = events.folder / "server.log"
    front = Front(launch.gateway, events.folder / "gateway.log", events.folder / "engine.json")
    supervisor = Supervisor(launch, front, log, events, options.drain_timeout_s, options.preflight)
    renewal = threading.Event()
    console.print(f"kimi-w4a8: one engine of {launch.name}; log: {log}", soft_wrap=True)
    try:
        with (
            signals_raise(drain=True, on_hangup=renewal.set),
            front,
            observed(options, launch.port, supervisor.state, front.metrics),
            nullcontext() if sys.stdout.isatty() else follow(log),
        ):
            _supervise(supervisor, front, renewal)
    except Terminated as stopped:
        console.print(f"kimi-w4a8: {stopped} received; the engine was stopped; log: {log}", soft_wrap=True)
        return stopped.exit_code
    return 0


def _supervise(supervisor: Supervisor, front: Front, renewal: threading.Event) -> None:
    """Keep gateway and engine running until Terminated is raised in this thread; raise KimiError for one that does not.

    renewal: set it to renew the engine.
    """
    # In a thread of its own: signals interrupt only the main one, and a child dies with the thread that started it.
    with ThreadPoolExecutor(1, "supervisor") as thread:
        kept = thread.submit(supervisor.keep)
        try:
            while not kept.done():
                wait([kept], _POLL_S)  # a lock without a time limit lets no signal handler run
                front.restart_if_ended()
                if renewal.is_set():
                    renewal.clear()
                    supervisor.renew()
        except Terminated as ended:
            if ended.number == signal.SIGTERM:
                supervisor.end()
                while not kept.done():
                    wait([kept], _POLL_S)  # a second signal ends the drain
            raise
        finally:
            supervisor.end_now()
        kept.result()


@contextmanager
def observed(options: ServeOptions, port: int, state: EngineState, gateway_metrics: Path) -> Iterator[None]:
    """Run probes, metrics and the repeated canary of a server at `port` inside the block."""
    ops_port = options.ops_beside(port)
    if not ops_port:
        yield
        return
    from ..ops.endpoint import OpsServer  # start-up: its web server

    with (
        OpsServer(options.ops_host, ops_port, state, gateway_metrics) as ops,
        watching(state, ops.acceptance),
    ):
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
                if path.stat().st_size < file.tell():  # it was begun anew
                    file.seek(0)
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

"""`kimi serve`: run one engine in the foreground, checked before and after its start, and end it cleanly."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rich.console import Console

from . import startup_check
from .client import EngineClient
from .errors import KimiError
from .run_dir import DEFAULT_ROOT, RECORD, new_run_dir, record, write_json
from .server import EngineServer
from .watchdog import Watchdog

if TYPE_CHECKING:
    from .recipes import Launch

# A cold start on MI325X reads 497 GB and builds kernels; the engine's own exit ends the wait earlier.
READY_TIMEOUT_S = 5400.0
_POLL_S = 0.5


class Terminated(Exception):
    """SIGTERM or SIGINT reached this process."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


def engine(launch: Launch, log_path: Path, name: str | None = None) -> EngineServer:
    """The engine process of a rendered recipe, not started."""
    return EngineServer(
        argv=launch.argv,
        env=launch.env,
        host=launch.host,
        port=launch.port,
        log_path=log_path,
        name=name or f"{launch.engine} ({launch.recipe})",
    )


def check_checkpoints(launch: Launch) -> None:
    """Read the checkpoints' headers and configs before any weight; repo ids not on this disk are left to the engine.

    The checks are those of the W4A8 format, which only the sglang recipes serve.
    """
    if launch.engine != "sglang":
        return
    from .quark.preflight import preflight

    model, draft = Path(launch.model), Path(launch.draft) if launch.draft else None
    if model.is_dir():
        preflight(
            model, draft if draft is not None and draft.is_dir() else None, launch.tensor_parallel
        ).raise_for_problems()


def serve_foreground(launch: Launch, runs: Path = DEFAULT_ROOT) -> int:
    """Serve until the engine ends or a signal comes; returns the exit code of `kimi serve`.

    Leaves no process behind, whatever ends it, and says where the log is.
    """
    console = Console(stderr=True, highlight=False)
    check_checkpoints(launch)
    folder = new_run_dir(f"serve-{launch.recipe}", runs)
    log = folder / "server.log"
    write_json(folder / RECORD, record("serve", {launch.recipe: {"argv": launch.argv, "env": launch.env}}, launch.env))
    console.print(f"kimi: log of the engine: {log}")
    server = engine(launch, log)
    try:
        with signals_raise(), server, follow(log):
            seconds = server.wait_ready(READY_TIMEOUT_S)
            _check_acceptance(launch, server, console)
            console.print(
                f"[bold green]kimi: {launch.recipe} is ready[/] after {seconds:.0f} s at {server.base_url}/v1"
            )
            return _wait(launch, server, folder, console)
    except Terminated as stopped:
        console.print(f"kimi: {stopped} received; the engine was stopped; log: {log}")
        return stopped.exit_code


@contextmanager
def signals_raise() -> Iterator[None]:
    """Turn SIGTERM and SIGINT into Terminated in the main thread, so that every `with` block cleans up."""

    def handler(number: int, _: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the clean-up
        raise Terminated(number)

    previous = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


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

    thread = threading.Thread(target=copy, name="log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(timeout=5.0)


def _check_acceptance(launch: Launch, server: EngineServer, console: Console) -> None:
    if launch.draft is None or launch.num_draft_tokens is None:
        return
    with EngineClient(server.base_url) as client:
        found = startup_check.require_acceptance(client, launch.num_draft_tokens, launch.draft)
    console.print(f"kimi: start-up check: accept length {found.length:.2f} of {launch.num_draft_tokens}")


def _wait(launch: Launch, server: EngineServer, folder: Path, console: Console) -> int:
    """Wait for the engine's end, with the progress watchdog beside it."""
    stalled = threading.Event()
    watchdog = Watchdog(server.base_url, launch.progress_timeout_s, on_stall=stalled.set, pid=server.pid, folder=folder)
    with watchdog:
        while server.poll() is None:
            if stalled.wait(_POLL_S):
                raise KimiError(
                    f"no token was generated for {launch.progress_timeout_s:.0f} s although requests are running",
                    where=str(folder),
                    remedy="the stacks of all processes are in that folder; on ROCm try the recipe option "
                    "all_reduce = 'rccl' (a hang in the custom all-reduce), then restart",
                )
    code = server.poll()
    raise KimiError(
        f"the engine ended by itself with exit code {code}",
        where=str(server.log_path),
        remedy="read the end of its log",
    )

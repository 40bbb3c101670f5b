"""Seconds of an engine's start by part: `python -m proof.figures.engine_start` (result: docs/design-notes.md).

The built-in model with EAGLE3 is started in three ways: as new processes, as SGLang does it; as forks, with the imports
of a new fork server; as forks of one that is there.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from kimi_w4a8_eagle3.engine.process import EngineServer, free_port
from kimi_w4a8_eagle3.recipe.launch import Launch, load_recipe, render
from laptop import fork_server

# The first line that SGLang logs after each part.
_PARTS = {
    "imports, arguments": "server_args=",
    "children: imports, weights, KV pools": "Engine startup timings",
    "HTTP server": "Uvicorn running on",
    "warm-up request, first /health": None,
}
_WAYS = (_NEW, _FIRST, _AGAIN) = ("new processes", "forks, new fork server", "forks")
_READY_S = 600.0


@dataclass(frozen=True)
class Start:
    """One start: seconds by part, CPU seconds and proportional memory (MB) by process."""

    parts: dict[str, float]
    cpu_s: dict[str, float]
    pss_mb: dict[str, float]


def measured(launch: Launch, folder: Path, way: str) -> Start:
    """Start one engine in one of the ways, stop it when it is ready."""
    seen: dict[str, float] = {}
    server = launch.server(folder / "server.log")
    if way == _NEW:
        server.command = launch.argv  # a command line is never forked
    earlier = {process.pid: _cpu_s(process) for process in _fork_servers()}
    began = time.monotonic()

    def look(*_: object) -> None:
        text = server.log_path.read_text(errors="replace")
        for part, sign in _PARTS.items():
            if sign is not None and sign in text:
                seen.setdefault(part, time.monotonic() - began)

    with server:
        server.wait_ready(_READY_S, look)
        look()
        seen[list(_PARTS)[-1]] = time.monotonic() - began
        processes = dict(_named(server))
        cpu = {name: _cpu_s(process) - earlier.get(process.pid, 0.0) for name, process in processes.items()}
        pss = {name: process.memory_full_info().pss / 2**20 for name, process in processes.items()}
        server.stop(0.5)
    ends = [seen[part] for part in _PARTS]
    return Start(dict(zip(_PARTS, _differences(ends), strict=True)), cpu, pss)


def _named(server: EngineServer) -> list[tuple[str, psutil.Process]]:
    engine = psutil.Process(server.pid)
    found = [("engine", engine)]
    for process in engine.children():
        title = " ".join(process.cmdline()).strip()
        if title.startswith("sglang::"):
            found.append((title.removeprefix("sglang::"), process))
    return found + [("fork server", process) for process in _fork_servers()]


def _fork_servers() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if fork_server.FORK_SERVER in each.cmdline()]


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _differences(ends: Sequence[float]) -> list[float]:
    return [end - start for start, end in zip([0.0, *ends], ends, strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="measure each way so often; the fastest is shown")
    rounds = parser.parse_args().rounds
    best: dict[str, Start] = {}
    for _ in range(rounds):
        for way in _WAYS:
            launch = render(load_recipe("tiny"), [f"port={free_port()}"])
            if way == _FIRST:
                fork_server.close()
            with tempfile.TemporaryDirectory() as folder:
                start = measured(launch, Path(folder), way)
            if way not in best or sum(start.parts.values()) < sum(best[way].parts.values()):
                best[way] = start
    console = Console(width=120)
    console.print(_table("seconds until /health answers", best, lambda start: start.parts))
    console.print(_table("CPU seconds", best, lambda start: start.cpu_s))
    console.print(_table("memory, MB (PSS)", best, lambda start: start.pss_mb))


def _table(title: str, starts: dict[str, Start], rows: Callable[[Start], dict[str, float]]) -> Table:
    table = Table(title=title)
    table.add_column("")
    for way in starts:
        table.add_column(way, justify="right")
    names = dict.fromkeys(name for start in starts.values() for name in rows(start))
    for name in names:
        table.add_row(name, *(f"{rows(s)[name]:,.1f}" if name in rows(s) else "-" for s in starts.values()))
    table.add_row("all", *(f"{sum(rows(start).values()):,.1f}" for start in starts.values()), style="bold")
    return table


if __name__ == "__main__":
    main()

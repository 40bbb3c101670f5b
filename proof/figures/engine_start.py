"""Seconds and CPU seconds of an engine's start: `python -m proof.figures.engine_start` (result: docs/design-notes.md).

The built-in model with EAGLE3 is started in three ways: as new processes, as SGLang does it; as forks, with the imports
of a new fork server; as forks of one that is there.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from kimi_w4a8_eagle3.engine.process import EngineServer, NewProcess, free_port
from kimi_w4a8_eagle3.recipe.launch import Launch, load_recipe, render
from kimi_w4a8_laptop import fork_server

_WAYS = (_NEW, _FIRST, _AGAIN) = ("new processes", "forks, new fork server", "forks")
_READY_S = 600.0


def measured(launch: Launch, log: Path, way: str) -> tuple[float, dict[str, float]]:
    """Start one engine in one of the ways; the seconds until it is ready, and CPU seconds by process."""
    server = launch.server(log)
    if way == _NEW:
        server = replace(server, starter=NewProcess())
    if way == _FIRST:
        fork_server.close()
    earlier = {process.pid: _cpu_s(process) for process in _fork_servers()}
    with server:
        seconds = server.wait_ready(_READY_S)
        cpu = {name: _cpu_s(process) - earlier.get(process.pid, 0.0) for name, process in _named(server).items()}
        server.stop(0.5)
    return seconds, cpu


def _named(server: EngineServer) -> dict[str, psutil.Process]:
    found = {"engine": psutil.Process(server.pid)}
    for process in found["engine"].children():
        title = " ".join(process.cmdline()).strip()
        if title.startswith("sglang::"):
            found[title.removeprefix("sglang::")] = process
    return found | {"fork server": process for process in _fork_servers()}  # noqa: B035  there is one at most


def _fork_servers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if fork_server.FORK_SERVER in child.cmdline()]


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="measure each way so often; the fastest is shown")
    best: dict[str, tuple[float, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(parser.parse_args().rounds):
            for way in _WAYS:
                launch = render(load_recipe("tiny"), [f"port={free_port()}"])
                found = measured(launch, Path(folder) / f"{number}-{way}.log", way)
                best[way] = min(best.get(way, found), found, key=lambda start: start[0])
    table = Table("", *best, title="CPU seconds by process")
    for name in dict.fromkeys(name for _, cpu in best.values() for name in cpu):
        table.add_row(name, *(f"{cpu.get(name, 0.0):.1f}" for _, cpu in best.values()))
    table.add_row("all", *(f"{sum(cpu.values()):.1f}" for _, cpu in best.values()), style="bold")
    table.add_row("seconds until it is ready", *(f"{seconds:.1f}" for seconds, _ in best.values()))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()

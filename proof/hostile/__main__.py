"""Measure `kimi-w4a8 serve tiny` alone and beside hostile clients: its CPU, and what an honest client waits.

    python -m proof.hostile [--seconds 20]

The hostile clients have niceness 19, as if they were on another machine. Each attack then meets a second gateway before
the same engine, which records the longest calls.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from math import exp, log, sqrt
from pathlib import Path
from statistics import mean, quantiles, stdev
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil
import typer
from rich.table import Table

from kimi_w4a8_eagle3.base.console import table_console
from kimi_w4a8_eagle3.base.http import bearer
from kimi_w4a8_eagle3.cli import run
from kimi_w4a8_eagle3.engine.metrics import read_once
from kimi_w4a8_eagle3.engine.process import EngineServer, free_port
from kimi_w4a8_eagle3.recipe.launch import load_recipe, render
from kimi_w4a8_eagle3.supervision.serve import signals_raise
from proof.load.served import ServedEngine

from .clients import ATTACKS, CHAT, HOSTILE_KEY, LONG, NO_KEY, SHORT, hostile

HTTP = "engine's HTTP process"
HONEST = bearer("key-of-an-honest-client")
_PAIRS, _STUDENT = 6, 2.571  # of Student's distribution with five degrees of freedom: 95 %
_TIMEOUT_S = 120.0


class Measured:
    """A running server and the processes of its roles."""

    def __init__(self, server: ServedEngine) -> None:
        self._server = server
        self._http = httpx.Client(base_url=server.base_url, headers=HONEST, timeout=_TIMEOUT_S)
        engine, scheduler = server.engine(), server.scheduler()
        words = [(one, " ".join(one.cmdline())) for one in server.look()]
        gateway = [one for one, said in words if "kimi_w4a8_eagle3.gateway" in said]
        workers = [child for one in gateway for child in one.children(recursive=True)]
        self.roles = {"gateway": {*gateway, *workers}, HTTP: {engine}, "scheduler": {scheduler}}

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of each role since its start."""
        return {name: sum(map(cpu_s, processes)) for name, processes in self.roles.items()}

    def phase(self, seconds: float) -> dict[str, float]:
        """Ask one short request after the other; return the waits, the cores of each role, and the engine's lag."""
        before, lag, began, waits = self.cpu_s(), self._lag(), time.monotonic(), list[float]()
        while (asked := time.monotonic()) < began + seconds or len(waits) < 2:
            self._http.post(CHAT, json=SHORT).raise_for_status()
            waits.append(1000 * (time.monotonic() - asked))
        cores = {f"cores, {name}": (now - before[name]) / seconds for name, now in self.cpu_s().items()}
        cuts, late = quantiles(waits, n=100), self._lag()
        each = 1000 * (late["sum"] - lag["sum"]) / (late["count"] - lag["count"])
        return {"wait p50, ms": cuts[49], "wait p99, ms": cuts[98], **cores, "engine's loop, mean lag, ms": each}

    def cost(self, body: Any, times: int, most: int = 10, alone: bool = False) -> tuple[dict[str, float], float]:
        """Ask `times` requests, `most` at a time; return the CPU ms of each role for one, and its events.

        alone: ask the engine's own chat endpoint.
        """
        named = json.loads((self._server.run / "engine.json").read_text())
        url, headers = (named["url"], bearer(named["secret"])) if alone else (self._server.base_url, HONEST)

        async def all_of_them() -> list[httpx.Response]:
            limits = httpx.Limits(max_connections=most)
            async with httpx.AsyncClient(base_url=url, headers=headers, timeout=_TIMEOUT_S, limits=limits) as http:
                return await asyncio.gather(*(http.post(CHAT, json=body) for _ in range(times)))

        before = self.cpu_s()
        events = [answer.raise_for_status().text.count("data: ") for answer in asyncio.run(all_of_them())]
        return {name: 1000 * (now - before[name]) / times for name, now in self.cpu_s().items()}, sum(events) / times

    def _lag(self) -> dict[str, float]:
        found = read_once(*self._server.address, timeout_s=_TIMEOUT_S)
        return {name: found.total(f"kimi_event_loop_lag_seconds_{name}") or 0.0 for name in ("sum", "count")}


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds of all threads."""
    return float(sum(process.cpu_times()[:2]))


def longest_ms(calls: Path, since: float) -> float:
    """Return the CPU ms of the longest recorded call since a monotonic second; 0 without one."""
    lines = [json.loads(line) for file in calls.iterdir() for line in file.read_text().splitlines()]
    return max((ms for second, ms, _ in lines if second >= since), default=0.0)


def attacks(engine_file: Path, keys: Path, seconds: float) -> Table:
    """Run one attack after the other at a second gateway; return the table of what each costs a worker."""
    table = Table("attack", "requests", "CPU ms each", "longest call, ms (goal 50)", title="each attack alone")
    port, calls, file = free_port(), keys.parent / "calls", keys.parent / "gateway.json"
    calls.mkdir()
    config = render(load_recipe("tiny"), [f"port={port}"]).gateway
    replace(config, engine_file=str(engine_file), key_file=str(keys)).write(file)
    words, log = [sys.executable, "-m", "proof.hostile.timed_gateway", str(file)], keys.parent / "gateway.log"
    with EngineServer(words, {"TIMED_CALLS": str(calls)}, "127.0.0.1", port, log, "the timed gateway") as gateway:
        gateway.wait_ready(_TIMEOUT_S)
        httpx.post(f"{gateway.base_url}{CHAT}", json=SHORT, headers=HONEST, timeout=_TIMEOUT_S).raise_for_status()
        family = [main := psutil.Process(gateway.pid), *main.children(recursive=True)]
        for name in ATTACKS:
            since, before = time.monotonic(), sum(map(cpu_s, family))
            with hostile(gateway.port, [name], seconds) as result:
                done = result.recv()[name]
            each = f"{1000 * (sum(map(cpu_s, family)) - before) / done:.2f}" if done else "no round ended"
            table.add_row(name, f"{done:,}", each + " (goal 5)" * (name in NO_KEY), f"{longest_ms(calls, since):.0f}")
    return table


def costs(measured: Measured, times: int) -> Table:
    """Return what requests cost the gateway and the engine's HTTP process, and 40 streams at a time all processes."""
    short, _ = measured.cost(SHORT, times)
    long, events = measured.cost(LONG, times // 3)
    ways = [[measured.cost(LONG, times, 40, alone)[0] for alone in (False, True)] for _ in range(_PAIRS)]
    ratios = [log(sum(alone.values()) / sum(through.values())) for through, alone in ways]
    half = _STUDENT * stdev(ratios) / sqrt(_PAIRS)
    low, middle, high = (f"{exp(mean(ratios) + sign * half):.2f}" for sign in (-1, 0, 1))
    table = Table("", "measured", "goal", title="what requests cost")
    chunk_us = 1000 * (long["gateway"] - short["gateway"]) / events
    for name, value, goal in (
        ("gateway, CPU ms a short request", short["gateway"], "1.5"),
        (f"gateway, CPU us a chunk ({events:.0f} in a stream of 48 tokens)", chunk_us, "80"),
        (f"{HTTP}, CPU ms a short request", short[HTTP], "2.3"),
        (f"{HTTP}, CPU ms a stream of 48 tokens", long[HTTP], "3.5"),
        ("the same, 40 at a time", mean(through[HTTP] for through, _ in ways), "3.5"),
        ("the same, when its own chat endpoint is asked", mean(alone[HTTP] for _, alone in ways), ""),
    ):
        table.add_row(name, f"{value:.2f}", goal)
    table.add_row(f"tokens a CPU second, {_PAIRS} pairs, to its own endpoint's", f"{middle} ({low} to {high})", "")
    return table


def beside(port: int, measured: Measured, seconds: float) -> Table:
    """Return what an honest client waits alone and beside hostile clients: by kind, and all."""
    kinds = {name: [name] for name in ATTACKS if name not in NO_KEY}
    phases: dict[str, list[str]] = {"alone": [], "without a key": list(NO_KEY), **kinds, "all": list(ATTACKS)}
    table = Table(title="an honest client, one short request at a time (goal: p99 1.5x)")
    for phase, names in phases.items():
        with hostile(port, names, seconds + 2) if names else nullcontext():
            time.sleep(1.0)  # until all have begun
            found = measured.phase(seconds)
        for name in () if table.columns else ("hostile clients", *found):
            table.add_column(name)
        table.add_row(phase, *(f"{value:.2f}" for value in found.values()))
    return table


def main(seconds: float = typer.Option(20.0, min=1.0, help="Seconds of each phase.")) -> None:
    """Print what requests cost, and what hostile clients do."""
    console = table_console()
    with signals_raise(), TemporaryDirectory(prefix="kh-") as folder:
        keys = Path(folder) / "keys"
        keys.write_text(f"{HONEST['Authorization'].split()[1]}\n{HOSTILE_KEY}\n")
        keys.chmod(0o600)
        with ServedEngine(Path(folder), ("--set", f"env.KIMI_API_KEY_FILE={keys}")) as server:
            server.wait_ready()
            measured = Measured(server)
            measured.cost(LONG, 10)  # warms up
            console.print(costs(measured, int(10 * seconds)))
            console.print(beside(server.port, measured, seconds))
            console.print(attacks(server.run / "engine.json", keys, max(1.0, seconds / 5)))
    console.print(f"{os.cpu_count()} cores, load average of the last minute {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    run(lambda: typer.run(main))

"""`kimi-w4a8 top`: a table of the replicas behind an ops endpoint, refreshed at an interval."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console
from rich.live import Live
from rich.table import Table

from ..base.console import table_console
from ..base.errors import KimiError
from ..base.prometheus import Reading
from ..base.tls import trusted
from ..engine.metrics import read_once

_TOKENS = "sglang:realtime_tokens_total"
_COLUMNS = (
    "replica",
    "phase",
    "running / queued",
    "KV in use",
    "output tok/s",
    "from the prefix cache",
    "accept length",
)


@dataclass(frozen=True)
class Scrape:
    """One scrape of the ops endpoint: replica states and metrics, taken at monotonic second `at`."""

    at: float
    replicas: list[dict[str, Any]]
    reading: Reading

    @classmethod
    def at_url(cls, url: str) -> Scrape:
        """Scrape the endpoint; raise KimiError when no ops endpoint answers at `url`."""
        try:
            states = httpx.get(f"{url}/status", timeout=10.0, verify=trusted()).json()["replicas"]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
            raise KimiError(
                f"no ops endpoint answers: {error or type(error).__name__}",
                where=url,
                remedy="give the ops address of `kimi-w4a8 serve` or `route`: http://HOST:9528 by default",
            ) from None
        return cls(time.monotonic(), states, read_once(url))


def table(before: Scrape, now: Scrape) -> Table:
    """Return a table with a row per replica and rates between the two scrapes; its caption lists unready replicas."""
    shown = Table(*_COLUMNS)
    for state in now.replicas:
        shown.add_row(state["name"], state["phase"], *_figures(state, before, now))
    waiting = [f"{state['name']}: {state['reason']}" for state in now.replicas if not state["ready"]]
    shown.caption = "\n".join(waiting)
    return shown


def _figures(state: dict[str, Any], before: Scrape, now: Scrape) -> list[str]:
    replica = {"replica": state["name"]}
    running, queued = (now.reading.total(f"sglang:num_{what}_reqs", **replica) for what in ("running", "queue"))
    if running is None:  # the engine does not answer
        return ["-"] * 5

    def grown(mode: str) -> float:
        counts = [(scrape.reading.total(_TOKENS, mode=mode, **replica) or 0.0) for scrape in (before, now)]
        return counts[1] - counts[0] if counts[1] >= counts[0] else counts[1]  # a restart counts from zero

    cached, computed = grown("prefill_cache"), grown("prefill_compute")
    length = (state["acceptance"] or {}).get("length")
    return [
        f"{running:.0f} / {queued or 0:.0f}",
        f"{now.reading.largest('sglang:token_usage', **replica) or 0:.1%}",
        f"{grown('decode') / max(now.at - before.at, 1e-9):.0f}",
        f"{cached / (cached + computed):.1%}" if cached + computed else "-",
        "-" if length is None else f"{length:.2f}",
    ]


def run(url: str, interval_s: float, once: bool, console: Console | None = None) -> None:
    """Show tables until Ctrl-C, or one with `once`. Without a terminal, print the tables one below the other."""
    console = console or table_console()
    before = Scrape.at_url(url)
    on_screen = console.is_terminal and not once
    with Live(console=console, screen=True, auto_refresh=False) if on_screen else nullcontext() as live:
        while True:
            time.sleep(interval_s)
            now = Scrape.at_url(url)
            if live:
                live.update(table(before, now), refresh=True)
            else:
                console.print(table(before, now))
            if once:
                return
            before = now

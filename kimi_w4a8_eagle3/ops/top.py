"""`kimi-w4a8 top`: a table of the replicas behind an ops endpoint, read again and again."""

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
from ..engine.metrics import look

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
class Look:
    """What the endpoint said `at` seconds (monotonic): the replicas' states, and the metrics of all."""

    at: float
    replicas: list[dict[str, Any]]
    reading: Reading

    @classmethod
    def at_url(cls, url: str) -> Look:
        """Raises KimiError when no ops endpoint answers at `url`."""
        try:
            states = httpx.get(f"{url}/status", timeout=10.0, verify=trusted()).json()["replicas"]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
            raise KimiError(
                f"no ops endpoint answers: {error or type(error).__name__}",
                where=url,
                remedy="give that of `kimi-w4a8 serve` or `route`: http://HOST:9528 by default",
            ) from None
        return cls(time.monotonic(), states, look(url))


def table(before: Look, now: Look) -> Table:
    """A row for each replica; rates are those between the two looks. Below it, why replicas are not ready."""
    shown = Table(*_COLUMNS)
    for state in now.replicas:
        shown.add_row(state["name"], state["phase"], *_figures(state, before, now))
    waiting = [f"{each['name']}: {each['reason']}" for each in now.replicas if not each["ready"]]
    shown.caption = "\n".join(waiting)
    return shown


def _figures(state: dict[str, Any], before: Look, now: Look) -> list[str]:
    replica = {"replica": state["name"]}
    running, queued = (now.reading.total(f"sglang:num_{what}_reqs", **replica) for what in ("running", "queue"))
    if running is None:  # its engine does not answer
        return ["-"] * 5

    def grown(mode: str) -> float:
        counts = [(each.reading.total(_TOKENS, mode=mode, **replica) or 0.0) for each in (before, now)]
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
    """Show until Ctrl-C, or, with `once`, one table of one interval. Tables below each other without a terminal."""
    console = console or table_console()
    before = Look.at_url(url)
    on_screen = console.is_terminal and not once
    with Live(console=console, screen=True, auto_refresh=False) if on_screen else nullcontext() as live:
        while True:
            time.sleep(interval_s)
            now = Look.at_url(url)
            if live:
                live.update(table(before, now), refresh=True)
            else:
                console.print(table(before, now))
            if once:
                return
            before = now

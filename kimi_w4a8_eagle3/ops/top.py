"""`kimi-w4a8 top`: a table of the replicas behind an ops endpoint, refreshed at an interval."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import httpx
from rich.console import Console
from rich.live import Live
from rich.table import Table

from ..base.console import table_console
from ..base.errors import KimiError
from ..base.tls import trusted

COLUMNS = (
    "replica",
    "phase",
    "running / queued",
    "KV in use",
    "output tok/s",
    "TTFT",
    "ITL",
    "cached",
    "accept length",
)


def status(url: str) -> dict[str, Any]:
    """Return the ops endpoint's /status; raise KimiError when no ops endpoint answers at `url`."""
    try:
        found: dict[str, Any] = httpx.get(f"{url}/status", timeout=10.0, verify=trusted()).json()
        return {**found, "replicas": list(found["replicas"])}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise KimiError(
            f"no ops endpoint answers: {error or type(error).__name__}",
            where=url,
            remedy="give the ops address of `kimi-w4a8 serve` or `route`: http://HOST:9528 by default",
        ) from None


def table(found: dict[str, Any]) -> Table:
    """Return a table with a row per replica; its caption lists unready replicas."""
    shown = Table(*COLUMNS, title=found["recipe"])
    for state in found["replicas"]:
        shown.add_row(state["name"], state["phase"], *_cells(state))
    shown.caption = "\n".join(
        f"{state['name']}: {state['reason']}" for state in found["replicas"] if not state["ready"]
    )
    return shown


def _cells(state: dict[str, Any]) -> list[str]:
    figures = state["figures"]
    if figures is None:  # the engine does not answer
        return ["-"] * (len(COLUMNS) - 2)

    def shown(value: float | None, pattern: str) -> str:
        return "-" if value is None else format(value, pattern)

    times = (shown(figures[name], ",.0f") for name in ("ttft_ms", "itl_ms"))
    return [
        f"{figures['running']} / {figures['queued']}",
        f"{figures['kv_in_use']:.1%}",
        f"{figures['output_tok_s']:.0f}",
        *(text if text == "-" else f"{text} ms" for text in times),
        shown(figures["cached"], ".1%"),
        shown((state["acceptance"] or {}).get("length"), ".2f"),
    ]


def run(url: str, interval_s: float, once: bool, console: Console | None = None) -> None:
    """Show tables until Ctrl-C, or one with `once`. Without a terminal, print the tables one below the other."""
    console = console or table_console()
    on_screen = console.is_terminal and not once
    with Live(console=console, screen=True, auto_refresh=False) if on_screen else nullcontext() as live:
        while True:
            shown = table(status(url))
            if live:
                live.update(shown, refresh=True)
            else:
                console.print(shown)
            if once:
                return
            time.sleep(interval_s)

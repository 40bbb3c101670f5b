"""`kimi-w4a8 top`: a live table of the replicas behind an ops endpoint."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from ..ops.top import run


def top(
    url: Annotated[str, typer.Argument(help="The ops endpoint.")] = "http://127.0.0.1:9528",
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two updates.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print the table of one interval and exit.")] = False,
) -> None:
    """Watch replicas: phase, load, KV pool, throughput, prefix cache, acceptance."""
    with suppress(KeyboardInterrupt):
        run(url, interval, once)

"""Progress of a measurement on the terminal: requests, tokens, time left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..base.console import table_console

Show = Callable[[int, int], None]  # finished requests and their output tokens


@contextmanager
def progress(total: int) -> Iterator[Show]:
    """Yield a function that shows how many of `total` requests are finished. Nothing is shown without a terminal."""
    console = table_console()
    text = TextColumn("{task.completed:.0f} of {task.total:.0f} requests, {task.fields[tokens]:,} tokens")
    columns = (text, BarColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        line = shown.add_task("", total=total, tokens=0)
        yield lambda requests, tokens: shown.update(line, completed=requests, tokens=tokens)

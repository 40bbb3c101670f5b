"""Progress of a measurement on the terminal: finished requests and time left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def request_progress(title: str, total: int | None, console: Console) -> Iterator[Callable[[int, str], None]]:
    """Yield a function that shows how many of `total` requests are finished, and a note. It needs a terminal."""
    text, left = TextColumn("{task.description}"), TextColumn("left")
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), left, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        line = shown.add_task(title, total=total)
        yield lambda finished, note: shown.update(line, completed=finished, description=f"{title}{note and ', '}{note}")

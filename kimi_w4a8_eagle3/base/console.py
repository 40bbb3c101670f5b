"""The console on which commands print their tables, and the progress of a measurement."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, ConsoleOptions
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_LOG_WIDTH = 240  # columns; more than any table here needs


class _PipeConsole(Console):
    """Console that draws tables with + - |, which every pager, grep and log can show."""

    @property
    def options(self) -> ConsoleOptions:
        options = super().options
        options.encoding = "ascii"  # Rich chooses a table's lines by it; text is written unchanged
        return options


def table_console(*, soft_wrap: bool = False) -> Console:
    """Return standard output. In a file or pipe, tables are ASCII and as wide as needed, unless COLUMNS is set.

    Without a terminal Rich assumes 80 columns, which would cut tables in log files.
    """
    console = Console(highlight=False, soft_wrap=soft_wrap)
    if console.is_terminal:
        return console
    width = None if "COLUMNS" in os.environ else _LOG_WIDTH
    return _PipeConsole(highlight=False, soft_wrap=soft_wrap, width=width)


@contextmanager
def request_progress(title: str, total: int | None, console: Console) -> Iterator[Callable[[int, str], None]]:
    """Yield a function that shows how many of `total` requests are finished, and a note. It needs a terminal."""
    text, left = TextColumn("{task.description}"), TextColumn("left")
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), left, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        line = shown.add_task(title, total=total)
        yield lambda finished, note: shown.update(line, completed=finished, description=f"{title}{note and ', '}{note}")

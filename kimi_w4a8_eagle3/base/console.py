"""The console on which commands print their tables."""

from __future__ import annotations

import os
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from .errors import printable

_LOG_WIDTH = 240  # columns; more than any table here needs


class _TerminalConsole(Console):
    """Console that shows no control characters of the texts it prints: files and servers of strangers bring some."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


class _PipeConsole(_TerminalConsole):
    """Console that draws tables with + - |, which every pager, grep and log can show."""

    @property
    def options(self) -> ConsoleOptions:
        options = super().options
        options.encoding = "ascii"  # Rich chooses a table's lines by it; text is written unchanged
        return options


def table_console() -> Console:
    """Return standard output. In a file or pipe, tables are ASCII and as wide as needed, unless COLUMNS is set.

    Without a terminal Rich assumes 80 columns, which would cut tables in log files.
    """
    console = _TerminalConsole(highlight=False)
    if console.is_terminal:
        return console
    width = None if "COLUMNS" in os.environ else _LOG_WIDTH
    return _PipeConsole(highlight=False, width=width)

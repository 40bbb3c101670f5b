"""Where commands print their tables."""

from __future__ import annotations

import os

from rich.console import Console

_LOG_WIDTH = 240  # columns; more than any table here needs


def table_console() -> Console:
    """Standard output; in a file or pipe tables are as wide as they need, unless COLUMNS says otherwise.

    Rich assumes 80 columns where it finds no terminal, which cuts tables in log files.
    """
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _LOG_WIDTH
    return console

"""Progress of a job that is counted in requests: a live bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def request_progress(
    title: str, total: int | None, console: Console, every: float = 15.0
) -> Iterator[Callable[[int, str], None]]:
    """Yield a function that shows how many of `total` requests are finished, and a note.

    Without a terminal, standard error gets at most one line in `every` seconds, and standard output stays clean.
    """
    text, left = TextColumn("{task.description}"), TextColumn("left")
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), left, TimeRemainingColumn())
    log, shown_at = Console(stderr=True, highlight=False, soft_wrap=True), time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        line = shown.add_task(title, total=total)

        def show(finished: int, note: str) -> None:
            nonlocal shown_at
            noted = f"{note and ', '}{note}"
            shown.update(line, completed=finished, description=title + noted)
            if not console.is_terminal and time.monotonic() - shown_at >= every:
                shown_at = time.monotonic()
                log.print(f"{title}: {finished}{f' of {total}' if total else ''}{noted}", markup=False)

        yield show

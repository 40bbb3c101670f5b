"""Show how a long download goes: a live bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from .model import human

Advance = Callable[[int], None]


@contextmanager
def show(console: Console, label: str, total: int, every: float = 15.0) -> Iterator[Advance]:
    """Yield a function that takes the number of bytes done since its last call; it may be called from any thread."""
    if not console.is_terminal:
        yield _LogLines(console, label, total, every)
        return
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(label, total=total)
        yield lambda count: progress.advance(task, count)


class _LogLines:
    """One line every `every` seconds, for output that is not a terminal."""

    def __init__(self, console: Console, label: str, total: int, every: float) -> None:
        self.console, self.label, self.total, self.every = console, label, total, every
        self.done, self.start, self.shown = 0, time.monotonic(), time.monotonic()
        self.lock = threading.Lock()

    def __call__(self, count: int) -> None:
        with self.lock:
            self.done += count
            now = time.monotonic()
            if now - self.shown < self.every:
                return
            self.shown = now
            rate = self.done / max(now - self.start, 1e-9)
        share = self.done / self.total if self.total else 1.0
        self.console.print(
            f"{self.label}: {human(self.done)} of {human(self.total)} ({share:.0%}), {human(rate)}/s",
            highlight=False,
            soft_wrap=True,
        )

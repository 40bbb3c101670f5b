"""Progress of a job that is counted in bytes: a live bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import threading
import time

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


class ByteProgress:
    """Bytes done of `total`. A log gets at most one line in `every` seconds. Any thread may call `advance`."""

    def __init__(self, console: Console, label: str, total: int, every: float = 15.0) -> None:
        self._console, self._label, self._total, self._every = console, label, total, every
        self._done, self._start, self._shown = 0, time.monotonic(), time.monotonic()
        self._lock = threading.Lock()
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._bar = Progress(TextColumn("[bold]{task.description}"), *columns, console=console)
        self._task = self._bar.add_task(label, total=total)

    def __enter__(self) -> ByteProgress:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def advance(self, count: int) -> None:
        """Count bytes; a negative `count` takes back bytes that turned out wrong."""
        if self._console.is_terminal:
            return self._bar.advance(self._task, count)
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now - self._shown < self._every:
                return None
            self._shown = now
            rate = self._done / max(now - self._start, 1e-9)
        share = self._done / self._total if self._total else 1.0
        line = f"{self._label}: {decimal(self._done)} of {decimal(self._total)} ({share:.0%}), {decimal(int(rate))}/s"
        return self._console.print(line, highlight=False, soft_wrap=True)

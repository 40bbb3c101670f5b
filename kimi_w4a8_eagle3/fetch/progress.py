"""Progress of a job that is counted in bytes: a live bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

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


ShowFile = Callable[[str, int], ByteProgress]


@contextmanager
def counted_reads(progress: ByteProgress, every: float = 0.5) -> Iterator[None]:
    """Advance `progress` by the bytes that this thread reads, for a library that hashes files and reports nothing.

    The kernel counts them in /proc. Without it the progress stays at 0.
    """
    counter, ended = Path(f"/proc/self/task/{threading.get_native_id()}/io"), threading.Event()

    def watch(before: int) -> None:
        while not ended.wait(every):
            seen = _bytes_read(counter)
            progress.advance(seen - before)
            before = seen

    watcher = threading.Thread(target=watch, args=(_bytes_read(counter),), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _bytes_read(counter: Path) -> int:
    try:
        return int(counter.read_text().split()[1])  # rchar: 1234
    except OSError:
        return 0

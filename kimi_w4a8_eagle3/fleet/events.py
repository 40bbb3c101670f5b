"""What happened to a fleet and when: one line for a person on the terminal, one JSON line for a program in the run."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from pathlib import Path

from rich.console import Console

EVENTS = "events.jsonl"
_STYLES = {"ready": "green", "registered": "green", "down": "red", "stalled": "red", "refused": "red", "gave-up": "red"}


class EventLog:
    """Appends to `folder/events.jsonl` and prints; used by several threads.

    A line: {"time": Unix seconds, "source": "replica-0" | "router" | "fleet", "event": word, "reason": sentence}.
    """

    def __init__(self, folder: Path, console: Console) -> None:
        self._path = folder / EVENTS
        self._console = console
        self._lock = threading.Lock()
        self._torn = False

    def __call__(self, source: str, event: str, reason: str = "") -> None:
        """Record one event."""
        line = json.dumps({"time": round(time.time(), 3), "source": source, "event": event, "reason": reason})
        text = f"kimi-w4a8: {source} {event}" + (f": {reason}" if reason else "")
        with self._lock:
            # A full disk, under the run or under a redirected terminal, must not end what cannot be recorded.
            with suppress(OSError):
                self._console.print(text, style=_STYLES.get(event, ""), markup=False)
            with suppress(OSError):
                self._append(line)

    def _append(self, line: str) -> None:
        start = "\n" if self._torn else ""  # the last line may have been cut where the disk was full
        self._torn = True
        with self._path.open("a") as file:
            file.write(f"{start}{line}\n")
        self._torn = False

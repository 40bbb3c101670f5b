"""Event log of a fleet: one line per event on the terminal, and one JSON line in the run folder."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from ..base.run_dir import RECORD, new_run_dir, record, write_json
from ..recipe.launch import Launch

EVENTS = "events.jsonl"
WANTED = "the supervisor ended it"  # reason of a `down` that is no failure
_STYLES = {"ready": "green", "registered": "green", "down": "red", "stalled": "red", "refused": "red", "gave-up": "red"}


class EventLog:
    """Appends to `folder/events.jsonl` and prints; several threads use it.

    A line: {"time": Unix seconds, "source": "replica-0" | "router" | "fleet", "event": word, "reason": sentence}.
    """

    @classmethod
    def begin(
        cls,
        kind: str,
        name: str,
        launches: Mapping[str, Launch],
        env: Mapping[str, str],
        runs: Path,
        console: Console,
        **facts: object,
    ) -> EventLog:
        """Create a run folder in `runs`, and write the run's record there."""
        folder = new_run_dir("-".join(filter(None, (kind, name))), runs)
        servers = {server: launch.described() for server, launch in launches.items()}
        write_json(folder / RECORD, record(kind, servers, env, **facts))
        return cls(folder, console)

    def __init__(self, folder: Path, console: Console) -> None:
        self.folder = folder
        self._path = folder / EVENTS
        self._console = console
        self._lock = threading.Lock()
        self._torn = False

    def __call__(self, source: str, event: str, reason: str = "") -> None:
        line = json.dumps({"time": round(time.time(), 3), "source": source, "event": event, "reason": reason})
        text = f"kimi-w4a8: {source} {event}" + (f": {reason}" if reason else "")
        with self._lock:
            # A full disk, under the run folder or a redirected terminal, must not end the fleet.
            with suppress(OSError):
                style = "" if reason == WANTED else _STYLES.get(event, "")
                self._console.print(text, style=style, markup=False)
            with suppress(OSError):
                self._append(line)

    def _append(self, line: str) -> None:
        start = "\n" if self._torn else ""  # a full disk may have cut the last line
        self._torn = True
        with self._path.open("a") as file:
            file.write(f"{start}{line}\n")
        self._torn = False

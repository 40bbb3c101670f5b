"""The folder that a supervisor gives to an engine as TMPDIR, and what both agree on."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

LOCK = "owner.lock"  # held by the supervisor while it lives
NOTES = "shared-memory*.txt"  # names of shared memory, one a line
SCHEDULER = "pulse"
LOOP = "loop"  # the event loop of the HTTP server
SENT, RECEIVED = "sent", "received"  # output for the detokenizer, and output that came back from it
UNCOUNTED = "kimi-canary-"  # ids of requests that belong to no client, so no metric of requests has them
SECRET = "secret.txt"  # noqa: S105  # a file's name: without what it holds, the engine answers nobody


def given_folder() -> Path | None:
    """Return the temporary folder that a supervisor gave to this process, or None without a supervisor."""
    folder = Path(tempfile.gettempdir())
    return folder if (folder / LOCK).is_file() else None


def note(path: str) -> None:
    """Record shared memory that this process creates next, so that the supervisor can remove it."""
    folder = given_folder()
    if folder is not None:
        with suppress(OSError), (folder / f"shared-memory-{os.getpid()}.txt").open("a") as file:
            file.write(f"{path}\n")


def engine_secret(folder: Path | None) -> str | None:
    """Return the secret in an engine's folder; None without a folder."""
    return None if folder is None else (folder / SECRET).read_text()


def file_of(folder: Path, pid: int, kind: str = SCHEDULER) -> Path:
    """Return the file that the process with this id touches; kind: one of the four above."""
    return folder / f"{kind}-{pid}"

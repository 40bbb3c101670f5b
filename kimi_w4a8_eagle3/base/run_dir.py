"""The folder of a run: its record, its results and the log of its events, readable later and on other machines."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from .errors import KimiError
from .files import write_atomic
from .installed import version_of

DEFAULT_ROOT = Path("runs")
RECORD = "run.json"
EVENTS = "events.jsonl"
KEPT, _DAY_S = 20, 86400.0  # run folders of one kind
MOST_LOG = 256 << 20
_created: list[Path] = []  # by this process
WANTED = "the supervisor ended it"  # reason of a `down` that is no failure
_STYLES = {"ready": "green", "down": "red", "stalled": "red", "gave-up": "red"}
_PACKAGES = ("kimi-w4a8-eagle3", "sglang", "aiter", "flydsl", "triton", "torch", "transformers", "lm_eval", "amd-quark")


def new_run_dir(kind: str, root: Path = DEFAULT_ROOT) -> Path:
    """Create `root/<UTC time>-<kind>`; a second run within the same second gets a number."""
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    for number in range(1, 1000):
        path = root / (f"{stamp}-{kind}" if number == 1 else f"{stamp}-{kind}-{number}")
        try:
            path.mkdir(mode=0o700, parents=True)  # logs and answers may hold what clients sent
            _created.extend((root, path))
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise KimiError(
                f"the run directory cannot be created: {error.strerror}",
                where=str(path),
                expected="a writable folder with free space",
                remedy="choose another place with --runs",
            ) from error
    raise KimiError("no free name for a run directory", where=str(root))


def remove_old(kind: str, root: Path) -> None:
    """Remove the oldest run folders of a kind, but for the newest `KEPT` and those that were written within a day."""
    for folder in sorted(root.glob(f"*Z-{kind}-*"))[:-KEPT]:
        with suppress(OSError):  # another process may remove it, too
            if time.time() - max(path.stat().st_mtime for path in (folder, *folder.iterdir())) > _DAY_S:
                shutil.rmtree(folder)


def bound(log: Path, most: int = MOST_LOG) -> None:
    """Begin a log anew when it has `most` bytes, and keep the old content beside it with the suffix `.1`.

    Its writers append, so they go on in the same file.
    """
    with suppress(OSError):  # a full disk must not end the engine
        if log.stat().st_size >= most:
            shutil.copyfile(log, older := log.with_name(f"{log.name}.1"))
            older.chmod(0o600)
            os.truncate(log, 0)


def remove_empty() -> None:
    """Remove those of this process's run folders that hold nothing, and then their root if it is empty."""
    while _created:
        with suppress(OSError):
            _created.pop().rmdir()


def write_json(path: Path, value: Any) -> None:
    """Write JSON; a reader never sees half a file. Raises KimiError when it cannot be written."""
    try:
        write_atomic(path, json.dumps(value, indent=2, default=str) + "\n")
    except OSError as error:
        raise KimiError(f"cannot write {path.name}: {error.strerror}", where=str(path)) from error


def record(kind: str, launches: Mapping[str, Any], gates: Mapping[str, str], **facts: Any) -> dict[str, Any]:
    """Return the facts that a reader needs to judge or repeat a run: versions, commit, command, gates, machine, time.

    launches: recipe name -> {"argv": ..., "env": ...} of every server started. gates: kernel variables in force.
    """
    return {
        "kind": kind,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv,
        "versions": installed_versions(),
        "git_commit": git_commit(),
        "machine": machine(),
        "gates": dict(gates),
        "servers": dict(launches),
        **facts,
    }


def installed_versions() -> dict[str, str]:
    """Return the versions of the packages that affect a result; absent ones are left out."""
    versions = {name: version_of(name) for name in _PACKAGES}
    return {"python": platform.python_version(), **{name: found for name, found in versions.items() if found}}


def git_commit() -> str | None:
    """Return the commit of this package's checkout, with `-dirty` for local changes; None outside a checkout."""
    try:
        out = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return out.stdout.strip() or None


def machine() -> dict[str, Any]:
    """Describe processor, cores and memory of this machine."""
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }


def _processor() -> str:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.processor()


class EventLog:
    """Appends to `folder/events.jsonl` and prints; several threads use it.

    A line: {"time": Unix seconds, "source": the recipe, "event": word, "reason": sentence}.
    """

    @classmethod
    def begin(
        cls,
        kind: str,
        name: str,
        servers: Mapping[str, Any],
        env: Mapping[str, str],
        runs: Path,
        console: Console,
        **facts: object,
    ) -> EventLog:
        """Create a run folder in `runs`, and write the run's record there; see `record` for servers and env."""
        remove_old(kind, runs)
        folder = new_run_dir("-".join(filter(None, (kind, name))), runs)
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
            # A full disk, under the run folder or a redirected terminal, must not end the engine.
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

"""Run directories: one folder per run with its record, results and logs, readable later and on other machines."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from .errors import KimiError
from .files import write_atomic

RECORD = "run.json"
DEFAULT_ROOT = Path("runs")
_PACKAGES = ("kimi-w4a8-eagle3", "sglang", "aiter", "flydsl", "triton", "torch", "transformers", "lm_eval", "amd-quark")


def new_run_dir(kind: str, root: Path = DEFAULT_ROOT) -> Path:
    """Create `root/<UTC time>-<kind>`; a second run within the same second gets a number."""
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    for number in range(1, 1000):
        path = root / (f"{stamp}-{kind}" if number == 1 else f"{stamp}-{kind}-{number}")
        try:
            path.mkdir(mode=0o700, parents=True)  # logs and answers may hold what clients sent
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
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


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

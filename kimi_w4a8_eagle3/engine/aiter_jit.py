"""A folder for the modules that AITER compiles at run time, when its installation is read-only."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from ..base.installed import find_root

VARIABLE = "AITER_JIT_DIR"


def jit_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables for an engine in `environ`; none if AITER is absent, writable, or has a folder already.

    Without AITER_JIT_DIR, AITER compiles into the home folder but imports from its installation. The engine then ends
    with ModuleNotFoundError after minutes of compiling. With it, AITER does both in that folder, so the installation's
    modules are linked there, too. Each installation gets its own folder.
    """
    root = find_root("aiter")
    installed = root / "aiter" / "jit" if root else None
    if installed is None or not installed.is_dir() or environ.get(VARIABLE) or os.access(installed, os.W_OK):
        return {}
    modules = sorted(installed.glob("*.so"))
    files = [(module.name, module.stat().st_size, module.stat().st_mtime_ns) for module in modules]
    identity = hashlib.sha256(repr((str(installed), files)).encode()).hexdigest()
    folder = Path(environ.get("HOME") or Path.home()) / ".aiter" / f"jit-{identity[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    for module in modules:
        with contextlib.suppress(FileExistsError):  # linked by an earlier start, or compiled for this GPU since
            (folder / module.name).symlink_to(module)
    return {VARIABLE: str(folder)}

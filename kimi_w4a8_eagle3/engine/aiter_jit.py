"""A folder for what AITER compiles at run time, where its installation cannot be written to."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from ..patching.locate import find_root

VARIABLE = "AITER_JIT_DIR"


def jit_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables for an engine in `environ`; none where AITER is absent, can write beside itself, or was told a folder.

    Left alone, AITER compiles into the home folder but imports from its installation: the engine ends with
    ModuleNotFoundError after minutes of compiling. With AITER_JIT_DIR it does both in that folder, so that the modules
    of the installation must be found there, too: as links. Another installation gets another folder.
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
        with contextlib.suppress(FileExistsError):  # from an earlier start, or compiled for this GPU since
            (folder / module.name).symlink_to(module)
    return {VARIABLE: str(folder)}

"""Commands of this installation, written so that the shell it was started from can run them."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from shutil import which

_PROGRAM = "kimi-w4a8"


def command() -> str:
    """Return `kimi-w4a8`, with its path where the shell would not find it."""
    installed = Path(sys.executable).with_name(_PROGRAM)
    if _found(installed):
        return _PROGRAM
    return _shown(installed) if installed.exists() else f"{_shown(Path(sys.executable))} -m kimi_w4a8_eagle3.cli"


def pip_install(*words: str) -> str:
    """Return the command that installs into this environment; the shell's own pip may belong to another one."""
    pip = "pip" if _found(Path(sys.executable).with_name("pip")) else f"{_shown(Path(sys.executable))} -m pip"
    return " ".join([pip, "install", *words])


def _found(program: Path) -> bool:
    found = which(program.name)
    return found is not None and program.exists() and Path(found).samefile(program)


def _shown(path: Path) -> str:
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))

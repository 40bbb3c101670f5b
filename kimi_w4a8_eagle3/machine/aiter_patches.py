"""State and application of `patches/*.patch`, the changes that this package makes to AITER's sources, by git.

A patch has no lines of context. It fits each AITER that has the lines that it removes. `aiter_regime` judges the page
offsets of every tree by its headers, patched or not.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ..base.errors import KimiError
from ..base.installed import find_root, operator_dir

BUILT = ("aiter/jit/*mha_batch_prefill*.so", "aiter/jit/build/*mha_batch_prefill*")  # compiled from patched headers


class State(str, Enum):
    """State of one patch in the installed AITER."""

    APPLIED = "applied"
    STALE_BUILD = "stale build"  # applied, but a module that was compiled before is still there
    NOT_APPLIED = "not applied"
    DOES_NOT_FIT = "does not fit"
    NOT_INSTALLED = "not installed"


@dataclass(frozen=True)
class PatchState:
    """One patch and its state; `detail` says why for a reader."""

    name: str
    state: State
    detail: str


def patch_states(root: Path | None = None) -> list[PatchState]:
    """Return the state of every patch in `root` (default: the folder of the installed AITER); change nothing."""
    root = root or find_root("aiter")
    return [_state(patch, root) for patch in _patches()]


def apply_patches(root: Path | None = None) -> list[PatchState]:
    """Apply every patch that fits, delete the modules that were compiled before, and return the states after it."""
    root = root or find_root("aiter")
    for patch in _patches():
        state = _state(patch, root)
        if root and state.state is State.NOT_APPLIED and (problem := _git_apply(root, patch)):
            raise KimiError(f"patch {patch.stem} cannot be applied", problem, remedy="run it as the owner of AITER")
        if root and state.state in (State.NOT_APPLIED, State.STALE_BUILD):
            for path in _stale_builds(root, patch):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    return patch_states(root)


def _patches() -> list[Path]:
    return sorted(operator_dir("patches").glob("*.patch"))


def _state(patch: Path, root: Path | None) -> PatchState:
    if root is None:
        return PatchState(patch.stem, State.NOT_INSTALLED, "no package aiter")
    if _git_apply(root, patch, "--check", "--reverse") is None:
        stale = ", ".join(map(str, _stale_builds(root, patch)))
        if stale:
            return PatchState(patch.stem, State.STALE_BUILD, f"compiled before the patch: {stale}")
        return PatchState(patch.stem, State.APPLIED, str(root))
    if problem := _git_apply(root, patch, "--check"):
        return PatchState(patch.stem, State.DOES_NOT_FIT, problem)
    return PatchState(patch.stem, State.NOT_APPLIED, str(root))


def _git_apply(root: Path, patch: Path, *options: str) -> str | None:
    """Run `git apply` in `root` and return its error; None if it succeeded."""
    if shutil.which("git") is None:
        return "git is not installed"
    command = ["git", "apply", "--unidiff-zero", *options, str(patch.resolve())]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    return (done.stderr.strip() or f"exit code {done.returncode}") if done.returncode else None


def _stale_builds(root: Path, patch: Path) -> list[Path]:
    """Return compiled modules that are older than the header that the patch changes."""
    headers = re.findall(r"^\+\+\+ b/(.*\.hpp)$", patch.read_text(encoding="utf-8"), re.MULTILINE)
    changed = [(root / header).stat().st_mtime for header in headers]
    built = [path for pattern in BUILT for path in root.glob(pattern)]
    return sorted(path for path in built if changed and path.stat().st_mtime < max(changed))

"""The original of a patched file lies beside it, as `mha.py.kimi-orig`, from before the file changes.

What an edit makes of the original is known, so the two tell whether somebody has changed the file since.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from ..base.errors import KimiError
from ..base.files import write_atomic
from .edit_state import Edit, State


def backup_path(path: Path) -> Path:
    """Where the original of `path` lies once it was patched."""
    return path.with_name(path.name + ".kimi-orig")


def is_patched(path: Path) -> bool:
    """Whether a patch of ours was begun here."""
    return backup_path(path).is_file()


def replace(path: Path, original: bytes, edited: bytes) -> None:
    """Back `path` up, then change it: a crash in between leaves a file that can be patched again, or reverted."""
    write_atomic(backup_path(path), original, like=path)
    shutil.copystat(path, backup_path(path))
    write_atomic(path, edited)


def objection(path: Path, edit: Edit) -> KimiError | None:
    """Why a patched file cannot be put back: it was changed since, or its backup is not the original."""
    backup = backup_path(path)
    if not is_patched(path):
        return None
    original = backup.read_bytes()
    if edit.inspect(original)[0] is not State.ORIGINAL:
        return KimiError("the backup is damaged", where=str(backup), remedy="reinstall the package")
    if path.read_bytes() not in (original, edit.apply(original)):
        return KimiError(
            "the file was changed after it was patched; reverting would lose that change",
            where=str(path),
            remedy=f"undo the later change, or merge by hand from {backup}",
        )
    return None


def restore(path: Path) -> None:
    """Put the backup back, byte for byte and with its time stamps."""
    backup_path(path).replace(path)

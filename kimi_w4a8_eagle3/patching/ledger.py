"""Backups of patched files: the original is stored beside the file, as `mha.py.kimi-orig`, before the file changes.

Applying the edit to the original again shows whether the patched file was changed since.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from ..base.errors import KimiError
from ..base.files import write_atomic
from .edit_state import Edit, State


def backup_path(path: Path) -> Path:
    """Return the path of the original of `path` after it was patched."""
    return path.with_name(path.name + ".kimi-orig")


def is_patched(path: Path) -> bool:
    """Return True if a patch of ours was begun on this file."""
    return backup_path(path).is_file()


def replace(path: Path, original: bytes, edited: bytes) -> None:
    """Back up `path`, then change it: after a crash in between it can still be patched again, or reverted."""
    write_atomic(backup_path(path), original, like=path)
    shutil.copystat(path, backup_path(path))
    write_atomic(path, edited)


def objection(path: Path, edit: Edit) -> KimiError | None:
    """Return the reason why a patched file cannot be restored: a later change, or a damaged backup."""
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
    """Restore the backup, byte for byte and with its time stamps."""
    backup_path(path).replace(path)

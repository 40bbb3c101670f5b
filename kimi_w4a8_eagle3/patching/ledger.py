"""What was done to one file: a backup and a record beside it, both written before the file changes.

`mha.py` patched leaves `mha.py.kimi-orig` (the original bytes) and `mha.py.kimi-patch.json`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from ..base.errors import KimiError
from ..base.files import write_atomic


@dataclass(frozen=True)
class Record:
    """The patch that owns a file and the file's SHA-256 before and after it."""

    patch: str
    before: str
    after: str

    @staticmethod
    def load(path: Path) -> Record | None:
        """The record beside `path`, or None when the file was never patched."""
        record = record_path(path)
        if not record.exists():
            return None
        try:
            return Record(**json.loads(record.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise KimiError("the record of a patch cannot be read", where=f"{record}: {error}") from error

    def save(self, path: Path) -> None:
        """Write the record beside `path`, atomically."""
        write_atomic(record_path(path), json.dumps(asdict(self), indent=2).encode() + b"\n", like=path)


def digest(data: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def record_path(path: Path) -> Path:
    """Where the record of `path` lies."""
    return path.with_name(path.name + ".kimi-patch.json")


def backup_path(path: Path) -> Path:
    """Where the original of `path` lies."""
    return path.with_name(path.name + ".kimi-orig")


def replace(path: Path, patch: str, original: bytes, edited: bytes) -> None:
    """Back `path` up, record the change, then change it: a crash in between leaves a file that can be reverted."""
    write_atomic(backup_path(path), original, like=path)
    shutil.copystat(path, backup_path(path))
    Record(patch, digest(original), digest(edited)).save(path)
    write_atomic(path, edited)


def check_restorable(path: Path, record: Record) -> None:
    """Raise a KimiError when `path` was changed after the patch, or when its backup is not the original."""
    current = digest(path.read_bytes())
    backup = backup_path(path)
    if current not in (record.before, record.after):
        raise KimiError(
            "the file was changed after it was patched; reverting would lose that change",
            where=str(path),
            expected=f"SHA-256 {record.after[:12]}…, found {current[:12]}…",
            remedy=f"undo the later change, or merge by hand from {backup}",
        )
    if current == record.after and not (backup.is_file() and digest(backup.read_bytes()) == record.before):
        raise KimiError("the backup is missing or damaged", where=str(backup), remedy="reinstall the package")


def restore(path: Path, record: Record) -> None:
    """Put the backup back, byte for byte and with its time stamps, and forget the record; checks first."""
    check_restorable(path, record)
    backup = backup_path(path)
    if digest(path.read_bytes()) == record.after:
        backup.replace(path)
    backup.unlink(missing_ok=True)
    record_path(path).unlink()

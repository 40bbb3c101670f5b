"""Write files atomically: even after a power cut a reader sees the old content or the new. Read TOML, check space."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from .errors import KimiError
from .toml import tomllib

RESERVE = 1 << 30  # bytes of a disk that stay free


def shortage(folder: Path, needed: int, elsewhere: str, free: int | None = None) -> KimiError | None:
    """Return the error if `needed` more bytes do not fit on the disk of `folder`, or None.

    `elsewhere` advises how to use another disk. `free` is the free space where the caller knows it.
    """
    if free is None:
        free = shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free
    if needed <= 0 or needed + RESERVE <= free:
        return None
    what = f"not enough disk space: {needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free"
    return KimiError(what, str(folder), f"{(needed + RESERVE) / 1e9:.1f} GB free", f"free space, or {elsewhere}")


def write_atomic(path: Path, content: str | bytes, like: Path | None = None) -> None:
    """Replace `path` by `content` (text as UTF-8) through a temporary file of its own in the same folder.

    Mode and owner are those of `like`, by default of the replaced file; a new file gets the usual ones. Raises OSError,
    and then the temporary file is removed and `path` is unchanged.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with temporary.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())  # a rename may reach the disk before the bytes do
        model = path if like is None else like
        with suppress(FileNotFoundError):
            status = model.stat()
            shutil.copymode(model, temporary)
            with suppress(PermissionError):
                os.chown(temporary, status.st_uid, status.st_gid)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file, with or without a byte order mark; raise KimiError if that is impossible."""
    try:
        return tomllib.loads(path.read_text("utf-8-sig"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        what = f"cannot read the file: {error.strerror}" if isinstance(error, OSError) else f"not valid TOML: {error}"
        raise KimiError(what, str(path)) from None

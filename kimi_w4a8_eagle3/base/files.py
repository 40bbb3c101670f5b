"""Write files atomically: even after a power cut a reader sees the old content or the new. Read TOML and JSON."""

from __future__ import annotations

import errno
import json
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


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace `path` by `content` (text as UTF-8) through a temporary file of its own in the same folder.

    Mode and owner are those of the replaced file; a new file gets the usual ones. Raises OSError, and then the
    temporary file is removed and `path` is unchanged.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with temporary.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())  # a rename may reach the disk before the bytes do
        with suppress(FileNotFoundError):
            status = path.stat()
            shutil.copymode(path, temporary)
            with suppress(PermissionError):
                os.chown(temporary, status.st_uid, status.st_gid)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def regular(path: Path) -> Path:
    """Return the path of an input file; raise OSError for a pipe or a device, whose content may never come."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
    return path


def read_text(path: Path, what: str = "the file", expected: str = "", remedy: str = "") -> str:
    """Return the text of a UTF-8 file, without a byte order mark; raise KimiError if `what` cannot be read."""
    try:
        return regular(path).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise KimiError(f"cannot read {what}: {reason}", str(path), expected, remedy) from None


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file; raise KimiError if there is none."""
    try:
        return tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise KimiError(f"not valid TOML: {error}", str(path)) from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raise KimiError for a missing or unreadable file and for other JSON."""
    try:
        content = json.loads(regular(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        remedy = "fetch the checkpoint again"
        raise KimiError(f"{path.name} is missing", str(path), "a Hugging Face model directory", remedy) from None
    except (OSError, ValueError, RecursionError) as error:
        what = f"{path.name} cannot be read: {error}"
        raise KimiError(what, str(path), "a JSON object", "fetch the file again") from error
    if not isinstance(content, dict):
        raise KimiError(f"{path.name} contains a JSON {type(content).__name__}", str(path), "a JSON object")
    return content


def write_private(path: Path, data: bytes) -> None:
    """Write a file for its owner alone; a reader never sees a part of it, and a full disk keeps none."""
    temporary = path.with_name(f".{path.name}")
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)

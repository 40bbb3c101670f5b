"""Write files atomically: even after a power cut a reader sees the old content or the new. Read lines, check space."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from .errors import KimiError

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


def lines(path: Path) -> list[str]:
    """Return the lines of a UTF-8 text file, cut at newlines only; raises OSError and UnicodeDecodeError as open does.

    `str.splitlines` would also cut at U+2028 and similar, which answers may contain.
    """
    with path.open(encoding="utf-8", newline="\n") as file:
        return [line.rstrip("\n") for line in file]

"""A file of clients' keys: one a line, with an optional name before it."""

from __future__ import annotations

import stat
from pathlib import Path

from ..base.errors import KimiError

_LEAST = 8  # characters of a key
_EXPECTED = f"lines of `KEY` or `NAME KEY`; a key has at least {_LEAST} visible ASCII characters"


def read_keys(path: Path) -> dict[str, str]:
    """Return the keys of a file by name; raise KimiError for one that cannot be used."""
    remedy = f"(umask 077; openssl rand -hex 32 >> {path})"  # appended: others of the file go on
    try:
        mode, text = path.stat().st_mode, path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
        raise KimiError(f"the key file cannot be read: {reason}", str(path), _EXPECTED, remedy) from error
    if mode & stat.S_IROTH:
        what = "every user of this machine can read the key file"
        raise KimiError(what, str(path), "mode 0600, or 0640 with a group of its own", f"chmod 600 {path}")
    keys: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or line.lstrip().startswith("#"):
            continue
        name = words[0] if len(words) == 2 else f"key{number}"
        if len(words) > 2 or not usable(words[-1]):
            what = f"line {number} of the key file holds no usable key"
            raise KimiError(what, str(path), _EXPECTED, "correct that line; `openssl rand -hex 32` prints a key")
        if name in keys:
            what = f"line {number} of the key file repeats the name {name}"
            raise KimiError(what, str(path), "a name of its own for each key", "rename one of the two")
        keys[name] = words[-1]
    if not keys:
        raise KimiError("the key file holds no key", str(path), _EXPECTED, remedy)
    return keys


def usable(key: str) -> bool:
    """Return True for a key that a header can carry and that nobody guesses."""
    return len(key) >= _LEAST and all("!" <= character <= "~" for character in key)

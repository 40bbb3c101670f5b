"""Lines of a JSONL file. `str.splitlines` would also cut at U+2028 and its like, which answers may contain."""

from __future__ import annotations

from pathlib import Path


def lines(path: Path) -> list[str]:
    """The lines of a UTF-8 text file, cut at newlines only; raises OSError and UnicodeDecodeError as open does."""
    with path.open(encoding="utf-8", newline="\n") as file:
        return [line.rstrip("\n") for line in file]

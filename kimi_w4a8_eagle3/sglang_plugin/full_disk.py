"""Output that cannot be written is dropped: a full disk under the log must not end an engine, or keep it from starting.

Python's `logging` survives a failed write, but `print`, progress bars and warnings raise, anywhere in SGLang.
"""

from __future__ import annotations

import sys
from typing import Any, TextIO


class Tolerant:
    """A text stream whose writes never raise OSError; in everything else the stream that it wraps."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or drop."""
        try:
            return self._stream.write(text)
        except OSError:
            return len(text)

    def writelines(self, lines: Any) -> None:
        """Write, or drop, line by line."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush, or leave it for the next time."""
        try:
            self._stream.flush()
        except OSError:
            return

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def install() -> None:
    """Wrap stdout and stderr of this process. Idempotent."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Tolerant):
            setattr(sys, name, Tolerant(stream))

"""Note shared memory of SGLang's that has a random name before it exists: see `leftovers`."""

from __future__ import annotations

from typing import Any

from ..engine.leftovers import note

TARGET = "sglang.srt.managers.load_snapshot.shm_path_for"


def write_down(path: str, *_: Any) -> None:
    """AFTER hook of `TARGET`, which names the file with a scheduler's load that `/v1/loads` reads."""
    note(path)

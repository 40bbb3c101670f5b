"""Note shared memory of SGLang's that has a random name before it exists: see `leftovers`."""

from __future__ import annotations

from ..engine.leftovers import note
from .hooks import Feature

FEATURE = Feature("the list of shared memory", remove_when="SGLang removes its shared memory when it is killed")


@FEATURE.after("sglang.srt.managers.load_snapshot.shm_path_for")
def write_down(path: str, *_: object) -> None:
    """Note the file with a scheduler's load that `/v1/loads` reads."""
    note(path)

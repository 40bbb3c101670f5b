"""Record SGLang's shared memory before it is created, so that the supervisor can remove it (`engine/leftovers.py`)."""

from __future__ import annotations

from ...engine.given_folder import note
from ..hooks import Feature

FEATURE = Feature("the list of shared memory", remove_when="SGLang removes its shared memory when it is killed")


@FEATURE.after("sglang.srt.managers.load_snapshot.shm_path_for")
def record(path: str, *_: object) -> None:
    """Record the file that holds a scheduler's load for `/v1/loads`."""
    note(path)

"""Page-offset arithmetic of the installed batch-prefill FMHA, read from its headers without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from .cpp_edits import SmallPagesLoadGlobally
from .edit_state import State
from .locate import find_root, first_file

Regime = Literal["silent", "fixed"]

_TREES = ("3rdparty/composable_kernel", "aiter_meta/3rdparty/composable_kernel", "projects/composablekernel", ".")
_SELECTOR = "example/ck_tile/01_fmha/fmha_fwd.hpp"
_PIPELINE = "include/ck_tile/ops/fmha/pipeline/block_fmha_batch_prefill_pipeline_qr_ks_vs_async.hpp"


def page_offset_regime(root: Path | None = None) -> Regime | None:
    """Return how the ck_tile headers below `root` treat page offsets beyond int32 (page size below a tile).

    root: the folder that contains the package `aiter` (site-packages or a checkout), or a composable_kernel or
        rocm-libraries checkout; None looks for the installed aiter.

    Returns "silent" (wrong pages are read), "fixed" (loads with 64-bit addresses: no limit), or None when there are no
    headers or they are not recognised. A caller must treat None like "silent".
    """
    root = root or find_root("aiter")
    if root is None or (selector := _source(root, _SELECTOR)) is None:
        return None
    choice, _ = SmallPagesLoadGlobally().inspect(selector)
    if choice in (State.ORIGINAL, State.APPLIED, State.UPSTREAM):
        pipeline = _source(root, _PIPELINE)
        return "fixed" if pipeline is not None and b"GLOBAL_LOAD_LDS" in pipeline else None
    return "silent" if choice is State.PREDATES else None


def _source(root: Path, name: str) -> bytes | None:
    path = first_file(root, tuple(f"{tree}/{name}" for tree in _TREES))
    return path.read_bytes() if path else None

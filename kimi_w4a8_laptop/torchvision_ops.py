"""Declare two of torchvision's custom operators when its binary does not fit the installed torch.

`import torchvision` registers fake implementations for these two even where its binary cannot be loaded, and fails when
they were never declared. This happens with a wheel built against CUDA beside a CPU torch. SGLang imports torchvision
for its image processors. Serving calls none of its operators, so declaring their schemas is enough.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys

import torch

_library: torch.library.Library | None = None


def declare_missing() -> None:
    """Declare the operators unless torchvision's own library declares them or torchvision is absent."""
    global _library
    if _library is not None or "torchvision" in sys.modules or _load_own_library():
        return
    _library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _load_own_library() -> bool:
    """Load torchvision's library as its import would do; return True also if torchvision is not installed.

    The import itself takes a second and imports torch's compiler, which engines of the built-in model do not need.
    """
    package = importlib.util.find_spec("torchvision")
    if package is None:
        return True
    library = importlib.machinery.PathFinder.find_spec("_C", package.submodule_search_locations)
    if library is None or library.origin is None:
        return False
    try:
        torch.ops.load_library(library.origin)
    except OSError:  # built against another torch
        return False
    return True

"""Declare torchvision's custom operators when its binary does not fit the installed torch.

`import torchvision` registers fake implementations for its operators and fails when they were never declared. This
happens with a wheel built against CUDA beside a CPU torch. SGLang imports torchvision for its image processors. Serving
text calls none of these operators, so declaring their schemas is enough.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
    "roi_pool(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width) "
    "-> (Tensor, Tensor)",
    "ps_roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio) -> (Tensor, Tensor)",
    "ps_roi_pool(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width) "
    "-> (Tensor, Tensor)",
    "deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, "
    "SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dil_h, SymInt dil_w, SymInt groups, SymInt offset_groups, "
    "bool use_mask) -> Tensor",
    "_cuda_version() -> int",
)
_BACKWARD = ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
_library: torch.library.Library | None = None


def declare_missing() -> None:
    """Declare the operators unless torchvision's own library declares them or torchvision is absent."""
    global _library
    if _library is not None or "torchvision" in sys.modules or _load_own_library():
        return
    _library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        _library.define(schema)
    for name in _BACKWARD:
        _library.define(f"_{name}_backward(Tensor grad) -> Tensor")


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

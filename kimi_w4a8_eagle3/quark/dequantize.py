"""Weights as float32, from the formats that are read and written here: 16-bit, FP8, W4A8, compressed-tensors INT4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..base.errors import KimiError
from .packing import fold_scales, unpack_reorder

if TYPE_CHECKING:
    from safetensors import safe_open

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def dequantize(parts: Mapping[str, Tensor]) -> Tensor:
    """The float32 matrix [N, K] that the tensors of one module stand for.

    parts: by the last part of their names, e.g. {"weight": ..., "weight_scale": ...}.
    """
    if "weight_packed" in parts:
        return _unpack_groups(parts["weight_packed"], parts["weight_scale"], parts["weight_shape"])
    weight, scale = parts["weight"], parts.get("weight_scale")
    if weight.dtype == torch.int32 and scale is not None and "weight_scale_2" in parts:
        return unpack_reorder(weight).float() * fold_scales(scale, parts["weight_scale_2"]).unsqueeze(-1)
    if weight.dtype in FP8 and scale is not None:
        return weight.float() * (scale.float().view(-1, 1) if scale.numel() > 1 else scale.float())
    if weight.is_floating_point() and scale is None:
        return weight.float()
    raise KimiError(f"a weight of {weight.dtype} with {sorted(parts)} is no known format")


def read_module(file: safe_open, module: str, names: list[str]) -> dict[str, Tensor]:
    """The tensors of `module` among `names`, by the last part of their names."""
    return {name[len(module) + 1 :]: file.get_tensor(name) for name in names}


def _unpack_groups(packed: Tensor, scale: Tensor, shape: Tensor) -> Tensor:
    """compressed-tensors pack-quantized: nibble i of an int32 is element i plus 8; one scale for a group of columns."""
    rows, columns = (int(size) for size in shape)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    values = (packed.unsqueeze(-1) >> shifts & 0xF).view(rows, -1)[:, :columns].float() - 8
    return (values.view(rows, scale.shape[1], -1) * scale.float().unsqueeze(-1)).view(rows, columns)

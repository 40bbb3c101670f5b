"""The slices for tensor parallelism that SGLang's loader takes of INT4 words."""

from __future__ import annotations

import torch

from kimi_w4a8_eagle3.quark.packing import pack_reorder as pack_reorder


def slice_rows(tensor: torch.Tensor, rank: int, tp: int, dim: int = -2, parts: int = 1) -> torch.Tensor:
    """This rank's output rows (gate/up) along `dim`. parts=2: it holds gate and then up, each sliced by itself."""
    dim = dim % tensor.dim()
    pieces = tensor.unflatten(dim, (parts, tp, tensor.shape[dim] // (parts * tp)))
    return pieces.select(dim + 1, rank).flatten(dim, dim + 1)


def slice_packed_columns(words: torch.Tensor, rank: int, tp: int) -> torch.Tensor:
    """This rank's input columns (down) of packed words [..., K/8], a view [..., K/8/tp]."""
    width = words.shape[-1] // tp
    return words.narrow(-1, rank * width, width)

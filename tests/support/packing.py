"""What AMD Quark and SGLang's loader do to INT4 words, spelled out: pack, and slice for tensor parallelism."""

from __future__ import annotations

import torch


def pack_reorder(values: torch.Tensor) -> torch.Tensor:
    """int8 [..., K] in [-8, 7] -> int32 [..., K/8]: the inverse of `quark.packing.unpack_reorder`."""
    words = torch.zeros(*values.shape[:-1], values.shape[-1] // 8, dtype=torch.int32, device=values.device)
    for element, nibble in enumerate((0, 4, 1, 5, 2, 6, 3, 7)):
        words |= (values[..., element::8].int() & 15) << (4 * nibble)
    return words


def slice_rows(tensor: torch.Tensor, rank: int, tp: int, dim: int = -2, parts: int = 1) -> torch.Tensor:
    """This rank's output rows (gate/up) along `dim`. parts=2: it holds gate and then up, each sliced by itself."""
    dim = dim % tensor.dim()
    pieces = tensor.unflatten(dim, (parts, tp, tensor.shape[dim] // (parts * tp)))
    return pieces.select(dim + 1, rank).flatten(dim, dim + 1)


def slice_packed_columns(words: torch.Tensor, rank: int, tp: int) -> torch.Tensor:
    """This rank's input columns (down) of packed words [..., K/8], a view [..., K/8/tp]."""
    width = words.shape[-1] // tp
    return words.narrow(-1, rank * width, width)

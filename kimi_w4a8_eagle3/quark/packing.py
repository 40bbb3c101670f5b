"""INT4 words in AMD Quark's format: unpack, pack, fold the two scales.

Eight two's complement nibbles share an int32. With nibble 0 the lowest four bits, `pack_method: reorder` keeps element
k of every group of eight in nibble (0, 4, 1, 5, 2, 6, 3, 7)[k]. Two delta swaps turn that order into the natural one
(nibble k = element k), so no table and no loop over elements or experts is needed.
"""

from __future__ import annotations

import torch

from ..base.errors import KimiError
from .weight_format import NIBBLES_PER_WORD

# (distance in bits, mask of the lower partner): swap bytes 1 and 2, then nibbles 1 and 2 of each half word.
_DELTA_SWAPS = ((8, 0x0000FF00), (4, 0x00F000F0))
_SIGN_BITS = 0x88888888 - (1 << 32)  # bit 3 of every nibble: two's complement <-> offset by 8
# Words converted at once: on a CPU the temporaries stay in the cache, on a GPU they stay below 0.5 GiB.
_CHUNK_WORDS = {"cpu": 1 << 16}
_GPU_CHUNK_WORDS = 1 << 24


def unpack_reorder(words: torch.Tensor) -> torch.Tensor:
    """Unpack the INT4 values of packed words.

    words: int32 [..., K/8]. Returns int8 [..., K], values in [-8, 7].
    """
    if words.dtype != torch.int32:
        raise KimiError(f"packed INT4 words have dtype {words.dtype}", expected=str(torch.int32))
    flat = words.contiguous().view(-1)
    values = torch.empty(flat.numel(), 4, dtype=torch.int16, device=words.device)  # two values an element
    for part in _chunks(flat.numel(), words.device):
        natural = _natural_order(flat[part] ^ _SIGN_BITS)
        pairs = values[part]
        pairs.copy_(natural.view(torch.uint8).view(-1, 4))
        pairs |= pairs << 4
        pairs &= 0x0F0F
        pairs.view(torch.int8).sub_(8)
    return values.view(torch.int8).view(*words.shape[:-1], words.shape[-1] * NIBBLES_PER_WORD)


def pack_reorder(values: torch.Tensor) -> torch.Tensor:
    """Pack int8 [..., K] in [-8, 7] to int32 [..., K/8], the inverse of `unpack_reorder`."""
    words = torch.zeros(*values.shape[:-1], values.shape[-1] // 8, dtype=torch.int32, device=values.device)
    for element, nibble in enumerate((0, 4, 1, 5, 2, 6, 3, 7)):
        words |= (values[..., element::8].int() & 15) << (4 * nibble)
    return words


def fold_scales(weight_scale: torch.Tensor, weight_scale_2: torch.Tensor) -> torch.Tensor:
    """Return one float32 scale a row, `weight_scale * weight_scale_2`.

    weight_scale: one stage-1 scale per projection, e.g. [] or [1] (one projection), [E] or [E, 2] (gate and up).
    weight_scale_2: stage-2 scales of the rows, [N] or [E, N]; each stage-1 scale covers an equal run of them.
    Returns float32 of weight_scale_2's shape.
    """
    projections, rows = weight_scale.numel(), weight_scale_2.numel()
    batched = weight_scale_2.dim() > 1
    if not projections or rows % projections or (batched and weight_scale.shape[:1] != weight_scale_2.shape[:1]):
        raise KimiError(
            f"weight_scale of shape {list(weight_scale.shape)} does not fit weight_scale_2 of shape "
            f"{list(weight_scale_2.shape)}",
            expected="one weight_scale for each projection, one weight_scale_2 for each of its rows",
        )
    rows_per_projection = weight_scale_2.float().reshape(projections, -1)
    return (rows_per_projection * weight_scale.float().reshape(-1, 1)).view(weight_scale_2.shape)


def _natural_order(words: torch.Tensor) -> torch.Tensor:
    """Swap the masked bits of each int32 word with the bits `distance` above them, in place."""
    for distance, mask in _DELTA_SWAPS:
        moved = words >> distance
        moved ^= words
        moved &= mask
        words ^= moved
        moved <<= distance
        words ^= moved
    return words


def _chunks(words: int, device: torch.device) -> list[slice]:
    step = _CHUNK_WORDS.get(device.type, _GPU_CHUNK_WORDS)
    return [slice(start, start + step) for start in range(0, words, step)]

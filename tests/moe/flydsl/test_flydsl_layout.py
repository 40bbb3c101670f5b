"""The packed layout: every value where the kernels expect it, and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.flydsl_layout import low_sums, unpack
from support.packing import pack_reorder

from kimi_w4a8_eagle3.moe.contract import MoeShape, QuarkMoeWeights
from kimi_w4a8_eagle3.moe.flydsl import layout
from kimi_w4a8_eagle3.quark.packing import unpack_reorder


def values(experts: int, channels: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-8, 8, (experts, channels, k), generator=torch.Generator().manual_seed(seed)).to(torch.int8)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(0, 1000))
def test_pack_then_unpack_is_identity(experts: int, tiles: int, chunks: int, seed: int) -> None:
    w = values(experts, 16 * tiles, 128 * chunks, seed)
    assert torch.equal(unpack(layout.pack(pack_reorder(w))), w)


@pytest.mark.parametrize("k", [0, 7, 8, 15, 16, 63, 64, 127, 128, 200])
@pytest.mark.parametrize("row", [0, 3, 4, 15])
@pytest.mark.parametrize("tile", [0, 1, 3])
def test_one_weight_lands_in_its_nibble(tile: int, row: int, k: int) -> None:
    """Written out from the documented formula, independently of pack's tensor gymnastics."""
    w = torch.zeros(1, 64, 256, dtype=torch.int8)
    zero = layout.pack(pack_reorder(w))
    w[0, 16 * tile + row, k] = -3
    changed = layout.pack(pack_reorder(w)) ^ zero
    chunk, j, g, low, i = k // 128, k // 64 % 2, k // 16 % 4, k // 8 % 2, k % 8
    where = changed.nonzero().tolist()
    assert where == [[0, tile, chunk, 16 * g + row, 8 * j + i]]
    assert changed[tuple(where[0])] == ((-3 + 8) ^ 8 if low else (-3 & 15) << 4)


def test_masks_give_the_sum() -> None:
    """The identity that the kernels rely on, in plain torch."""
    w = values(1, 32, 256, 5)
    packed = layout.pack(pack_reorder(w))[0]
    a = torch.randint(-127, 128, (1, 256), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    grouped = packed.view(2, 2, 4, 16, 2, 8)
    high = (grouped & 0xF0).view(torch.int8).long()
    low = (grouped & 0x0F).long()
    rows = a.view(2, 2, 4, 2, 8).long()  # chunk, j, g, low, i
    acc_high = torch.einsum("tcgnji,cjgi->tn", high, rows[:, :, :, 0])
    acc_low = torch.einsum("tcgnji,cjgi->tn", low, rows[:, :, :, 1])
    result = acc_high // 16 + acc_low - 8 * low_sums(a)
    assert torch.equal(result.flatten(), w[0].long() @ a[0].long())


def test_prepare_keeps_scales_and_names_the_layout() -> None:
    shape = MoeShape(num_experts=2, hidden=128, inter=128, top_k=2)
    w13, w2 = values(2, 256, 128, 1), values(2, 128, 128, 2)
    scales = torch.rand(2, 256), torch.rand(2, 128)
    moe = layout.prepare(QuarkMoeWeights(shape, pack_reorder(w13), pack_reorder(w2), *scales))
    assert moe.layout == "flydsl-int4-16x128"
    assert moe.w13.numel() == 2 * 256 * 128 // 2 and moe.w2.numel() == 2 * 128 * 128 // 2
    paired = w2.view(2, 4, 4, 2, 4, 128).transpose(2, 3).reshape(2, 128, 128)  # 8*g + 4*half + r of 32 channels
    assert torch.equal(unpack(moe.w13), w13) and torch.equal(unpack(moe.w2), paired)
    relative, unit = moe.s2[:, :128], moe.s2[:, 128:129]
    assert torch.equal(relative, scales[1] / unit) and moe.s2.shape == (2, 132)
    assert (relative.amax(1) * 127 * 8 * 128 <= 65504).all() and (relative.amax(1) == 0.5).all()
    assert torch.equal(moe.s13, scales[0])
    assert torch.equal(unpack_reorder(pack_reorder(w2)), w2)

"""MXFP4 on FlyDSL: the packed layout in plain torch, and whole forwards in the gfx942 interpreter."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from support.extent import extent

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.moe.contract import MoeShape, QuarkMoeWeights
from kimi_w4a8_eagle3.moe.flydsl import layout
from kimi_w4a8_eagle3.moe.flydsl.backend import W4A16_GATE, FlydslBackend
from kimi_w4a8_eagle3.moe.reference import integers
from kimi_w4a8_eagle3.quark.weight_format import MXFP4
from kimi_w4a8_lab.kernels.random_layers import random_layer
from proof.interpreted import (
    TOLERANCE,
    InterpretedBackend,
    batch_of,
    call_of,
    check_sums,
    check_tokens,
    error,
    prepared,
    shape_of,
)

SMALL = MoeShape(2, 256, 128, 2, weights=MXFP4)
PREFILL = {"AITER_FLYDSL_STAGE1_TILE_M": 64}


def random_weights() -> QuarkMoeWeights:
    weights = random_layer(SMALL, torch.device("cpu"))
    assert weights.shift13 is not None and weights.shift2 is not None
    weights.shift13[0, :8] = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])  # rows with small shifts
    weights.shift13[1, 20:40, 1] = torch.arange(20) % 12
    weights.w13[0, 9], weights.w13[1, 5, :16] = 0, 0x88  # a row of zeros and a block of negative zeros
    return weights


def shifted(codes: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """The INT8 that the kernels make of codes, by the formula of docs/perf/kernels.md."""
    by = shift[..., None]
    pair = torch.tensor(layout.PAIRS)[(codes & 7).int()]
    mask = torch.where(codes >= 8, 0, 0xFC)
    low = lambda value: torch.where(by < 4, value << by.clamp(max=3), 0) & 0xFF  # noqa: E731
    return (low(pair) ^ low(mask)).to(torch.uint8).view(torch.int8).long()


def test_the_packed_layout_is_the_contracts_integers() -> None:
    weights = random_weights()
    moe = layout.prepare(weights)
    shift = weights.shift13
    assert shift is not None
    expected = integers(weights.w13, shift).long()
    experts, channels, k = expected.shape
    codes, by_lane = moe.w13.split([channels * k // 2, channels * k // 32], 1)
    tiles = codes.view(experts, channels // 16, k // 128, 4, 16, 2, 8)  # chunk, g, n, j, byte
    halves = torch.stack([tiles >> 4, tiles & 15], -2)  # ..., j, half, byte
    in_k = halves.permute(0, 1, 4, 2, 3, 5, 6, 7).reshape(experts, channels, k // 32, 32)
    lanes = by_lane.view(experts, channels // 16, k // 128, 4, 16).permute(0, 1, 4, 2, 3).reshape(experts, channels, -1)
    rest, own = (lanes >> layout.REST)[..., None].long(), (lanes & 63).long()
    parts = [(0, own)] + [(m, torch.where(own & 60 == layout.FAR - 4 + m, own & 3, layout.FAR)) for m in (4, 8)]
    products = [shifted(in_k.long(), by) << rest + more for more, by in parts]
    assert torch.equal(sum(products).view_as(expected), expected)
    assert all(bool(product.any()) for product in products)
    assert (lanes[0, :8] < layout.NEAR).all() and bool((rest > 0).any())
    by_channel = rest.view(experts, channels, -1, 4)  # any lane of a channel has it
    assert torch.equal(by_channel, by_channel[..., :1].expand_as(by_channel))
    assert torch.equal(moe.s13, weights.s13) and moe.layout == "flydsl-mxfp4-16x128"


def test_the_down_projection_is_paired_with_its_shifts(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = random_weights()
    assert weights.shift2 is not None
    straight = layout.pack(weights.w2.view(torch.int32), shifts=weights.shift2)
    paired = layout.pack(weights.w2.view(torch.int32), True, weights.shift2)
    monkeypatch.setattr(layout, "_SLICE_WORDS", 1)
    assert torch.equal(layout.pack(weights.w2.view(torch.int32), True, weights.shift2), paired)
    codes = SMALL.hidden * SMALL.inter // 2
    for part, size in ((slice(codes), 16), (slice(codes, None), 1)):
        lanes = straight[:, part].view(2, -1, 4, 16, size)  # tile, g, n of one chunk
        again = paired[:, part].view(2, -1, 2, 4, 16, size)  # tiles 2p and 2p + 1
        for channel in range(32):
            group, half, r = channel // 8, channel // 4 % 2, channel % 4
            expected = lanes.view(2, -1, 2, 4, 16, size)[:, :, channel // 16, :, channel % 16]
            assert torch.equal(again[:, :, half, :, 4 * group + r], expected)


def test_bad_requests_are_named() -> None:
    with pytest.raises(KimiError, match="W4A16 baseline has no kernels for MXFP4"):
        FlydslBackend({W4A16_GATE: "w2_bf16"}).configs(replace(SMALL, inter=256), 8)


@pytest.mark.kernels
@pytest.mark.slow
@pytest.mark.skipif(find_spec("flydsl") is None, reason="flydsl is not installed (extra `kernels`)")
class TestInterpreted:
    @pytest.mark.parametrize(
        ("tp", "tokens", "gates"), [(8, 1, {}), (8, 2, {}), (8, 8, PREFILL), *extent([], [(8, 70, {})])], ids=str
    )
    def test_forward_is_the_reference(self, tp: int, tokens: int, gates: dict[str, Any]) -> None:
        assert error(InterpretedBackend(gates), shape_of("mxfp4", tp), tokens) < TOLERANCE

    def test_nan_stays_in_its_token_and_bits_do_not_depend_on_the_kernels(self) -> None:
        check_tokens(InterpretedBackend({}), shape_of("mxfp4", 8), 2)

    @pytest.mark.parametrize(("tokens", "gates"), [(2, {}), (4, PREFILL)], ids=str)
    def test_the_sums_are_the_contracts_integers(self, tokens: int, gates: dict[str, Any]) -> None:
        """Layers have the largest sums, tiles of every kind of shifts, and blocks and rows of zeros."""
        shape = shape_of("mxfp4", 8)
        check_sums(call_of(InterpretedBackend(gates), shape, batch_of(shape, tokens)))

    def test_a_wrong_shift_is_found(self) -> None:
        shape = shape_of("mxfp4", 8)
        codes = shape.hidden * shape.inter  # w13's have half a byte each
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("proof.interpreted.prepared", lambda _: (prepared(shape)[0], altered))
            altered = deepcopy(prepared(shape)[1])
            altered.w13[:, codes:] ^= 1
            with pytest.raises(KimiError, match="sums of stage 1 differ"):
                check_sums(call_of(InterpretedBackend(), shape, batch_of(shape, 2)))

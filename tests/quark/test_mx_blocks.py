"""MXFP4 blocks as integers, shifts and row scales, against their values in exact fractions."""

from fractions import Fraction

import pytest
import torch

from kimi_w4a8_eagle3.quark import packing
from kimi_w4a8_eagle3.quark.packing import ABSENT, MAX_SHIFT, MOST_STEPS, fold_exponents, pack_codes, unpack_codes
from kimi_w4a8_eagle3.quark.weight_format import INT4, MXFP4

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_the_integers_of_the_formats():
    assert [integer / 2 for integer in MXFP4.integers] == E2M1 + [-value for value in E2M1]
    assert (INT4.largest, MXFP4.largest, INT4.bits, MXFP4.bits) == (8, 12, 4, 4.25)


def test_packing_is_the_inverse_of_unpacking():
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x0F != 8) & (codes >> 4 != 8)]  # minus zero comes back as zero
    assert unpack_codes(torch.tensor([0x71, 0x9F], dtype=torch.uint8)).tolist() == [1, 12, -12, -1]
    assert torch.equal(pack_codes(unpack_codes(codes)), codes)


def folded(codes: torch.Tensor, exponents: torch.Tensor) -> tuple[list[torch.Tensor], list[list[Fraction]]]:
    """Return the shifts of each part, and the weights [N][K] that the kernels compute with."""
    integers, parts = unpack_codes(codes).view(*exponents.shape, 32), fold_exponents(codes[None], exponents[None])
    weights = [[Fraction(0)] * integers[0].numel() for _ in integers]
    for (shifts,), (scales,) in parts:
        steps = torch.where(shifts < ABSENT, 1 << shifts.int(), 0)
        assert int(steps.sum(1).max()) <= MOST_STEPS  # the sums of every part fit int32
        values = (integers * steps[..., None]).flatten(1).tolist()
        for row, part, scale in zip(weights, values, scales.tolist(), strict=True):
            row[:] = [weight + integer * Fraction(scale) for weight, integer in zip(row, part, strict=True)]
    return [shifts for (shifts,), _ in parts], weights


def stored(codes: torch.Tensor, exponents: torch.Tensor) -> list[list[Fraction]]:
    values = unpack_codes(codes).view(*exponents.shape, 32).tolist()
    return [
        [Fraction(value, 2) * Fraction(2) ** (e - 127) for block, e in zip(row, row_e, strict=True) for value in block]
        for row, row_e in zip(values, exponents.tolist(), strict=True)
    ]


@pytest.mark.parametrize("highest", [MAX_SHIFT + 2, 120, 254])
def test_a_row_within_twelve_octaves_has_one_part(highest):
    codes = torch.randint(0, 256, (64, 16 * 12), dtype=torch.uint8)
    exponents = torch.randint(highest - MAX_SHIFT, highest + 1, (64, 12), dtype=torch.uint8)
    (shifts,), weights = folded(codes, exponents)
    assert weights == stored(codes, exponents) and int(shifts.max()) == MAX_SHIFT


def test_a_layer_that_is_folded_in_slices_has_the_same_parts(monkeypatch):
    codes = torch.randint(0, 256, (3, 2, 64), dtype=torch.uint8)
    codes[0] = 0
    layer = codes, torch.randint(100, 140, (3, 2, 4), dtype=torch.uint8)
    whole = fold_exponents(*layer)
    monkeypatch.setattr(packing, "_CHUNK_BYTES", 1)
    for (shifts, scales), again in zip(whole, fold_exponents(*layer), strict=True):
        assert torch.equal(shifts, again[0]) and torch.equal(scales, again[1])


def test_blocks_and_rows_of_zeros_do_not_count():
    codes = torch.randint(0, 256, (3, 16 * 4), dtype=torch.uint8) | 0x11
    exponents = torch.full((3, 4), 120, dtype=torch.uint8)
    codes[0, 16:32], exponents[0, 1] = 0, 0
    codes[1, :16], exponents[1, 0] = 0x88, 254  # minus zero
    codes[2] = 0
    (shifts,), weights = folded(codes, exponents)
    assert weights == stored(codes, exponents) and not shifts.any()


@pytest.mark.parametrize(("span", "parts"), [(11, 1), (12, 2), (13, 2), (20, 2), (23, 2), (24, 3), (254, 3)])
def test_blocks_far_below_the_largest_are_in_a_part_of_their_own(span, parts):
    codes = torch.randint(0, 256, (8, 16 * 8), dtype=torch.uint8) | 0x11
    exponents = torch.full((8, 8), 254 - span, dtype=torch.uint8)
    exponents[:, 2], exponents[:4, 5], exponents[7] = 254, 254 - min(span, 12), 254
    shifts, weights = folded(codes, exponents)
    assert weights == stored(codes, exponents) and len(shifts) == parts
    assert [bool((part == ABSENT).any()) for part in shifts] == [parts > 1] + [True] * (parts - 1)


def test_any_exponents_are_exact():
    codes = torch.randint(0, 256, (16, 16 * 6), dtype=torch.uint8)
    exponents = torch.randint(0, 255, (16, 6), dtype=torch.uint8)
    assert folded(codes, exponents)[1] == stored(codes, exponents)


@pytest.mark.parametrize(("high", "parts"), [(21, 1), (22, 2), (224, 2)])
def test_sums_fit_int32_whatever_the_row(high: int, parts: int) -> None:
    """21 blocks at 2**11 and 203 at 2**0 give less than MOST_STEPS, 22 more."""
    codes, exponents = torch.full((1, 16 * 224), 0x77, dtype=torch.uint8), torch.full((1, 224), 100, dtype=torch.uint8)
    exponents[0, :high] += MAX_SHIFT
    exponents[0, 0] -= MAX_SHIFT * (high == 224)
    shifts, weights = folded(codes, exponents)
    assert weights == stored(codes, exponents) and len(shifts) == parts


@pytest.mark.parametrize("exponent", [0, 1])
def test_a_scale_below_float32s_normal_numbers_is_in_a_part_of_its_own(exponent):
    codes, exponents = torch.full((1, 16), 0x77, dtype=torch.uint8), torch.tensor([[exponent]], dtype=torch.uint8)
    shifts, weights = folded(codes, exponents)
    assert weights == stored(codes, exponents) and [int(part) for part in shifts] == [ABSENT, 0]

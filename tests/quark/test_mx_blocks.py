"""MXFP4 blocks as integers, shifts and row scales, against their values in exact fractions."""

from fractions import Fraction

import pytest
import torch

from kimi_w4a8_eagle3.quark.packing import MAX_SHIFT, MOST_STEPS, fold_exponents, pack_codes, unpack_codes
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


def folded(codes: torch.Tensor, exponents: torch.Tensor) -> tuple[torch.Tensor, list[list[Fraction]], int]:
    """Return the shifts, the weights [N][K] that the kernels compute with, and the number of re-coded blocks."""
    shifts, scales, recoded = fold_exponents(codes[None], exponents[None])
    integers = unpack_codes(codes).view(*exponents.shape, 32).int() << shifts[0, :, :, None].int()
    rows = zip(integers.flatten(1).tolist(), scales[0].tolist(), strict=True)
    return shifts[0], [[integer * Fraction(scale) for integer in row] for row, scale in rows], recoded


def stored(codes: torch.Tensor, exponents: torch.Tensor) -> list[list[Fraction]]:
    values = unpack_codes(codes).view(*exponents.shape, 32).tolist()
    return [
        [Fraction(value, 2) * Fraction(2) ** (e - 127) for block, e in zip(row, row_e, strict=True) for value in block]
        for row, row_e in zip(values, exponents.tolist(), strict=True)
    ]


@pytest.mark.parametrize("highest", [MAX_SHIFT + 2, 120, 254])
def test_a_row_within_twelve_octaves_is_exact(highest):
    codes = torch.randint(0, 256, (64, 16 * 12), dtype=torch.uint8)
    exponents = torch.randint(highest - MAX_SHIFT, highest + 1, (64, 12), dtype=torch.uint8)
    exact = stored(codes, exponents)
    shifts, weights, recoded = folded(codes, exponents)
    assert weights == exact and recoded == 0 and int(shifts.max()) == MAX_SHIFT


def test_blocks_and_rows_of_zeros_do_not_count():
    codes = torch.randint(0, 256, (3, 16 * 4), dtype=torch.uint8) | 0x11
    exponents = torch.full((3, 4), 120, dtype=torch.uint8)
    codes[0, 16:32], exponents[0, 1] = 0, 0
    codes[1, :16], exponents[1, 0] = 0x88, 254  # minus zero
    codes[2] = 0
    exact = stored(codes, exponents)
    shifts, weights, recoded = folded(codes, exponents)
    assert weights == exact and recoded == 0 and not shifts.any()


@pytest.mark.parametrize("below", [1, 2, 3, 4, 5, 40])
def test_a_block_too_far_below_is_recoded_to_the_nearest_step(below):
    codes = torch.tensor([[0x77] * 16 + [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2], dtype=torch.uint8)
    exponents = torch.tensor([[120, 120 - MAX_SHIFT - below]], dtype=torch.uint8)
    exact = stored(codes, exponents)[0]
    _, (weights,), recoded = folded(codes, exponents)
    step = Fraction(2) ** (120 - MAX_SHIFT - 128)
    assert recoded == 1 and weights == [round(weight / step) * step for weight in exact]


@pytest.mark.parametrize(("high", "recoded"), [(21, False), (22, True), (224, True)])
def test_sums_fit_int32_whatever_the_row(high: int, recoded: bool) -> None:
    """21 blocks at 2**11 and 203 at 2**0 give less than MOST_STEPS, 22 more."""
    codes, exponents = torch.full((1, 16 * 224), 0x77, dtype=torch.uint8), torch.full((1, 224), 100, dtype=torch.uint8)
    exponents[0, :high] += MAX_SHIFT
    exponents[0, 0] -= MAX_SHIFT * (high == 224)
    shifts, _, found = folded(codes, exponents)
    assert int((1 << shifts.int()).sum()) <= MOST_STEPS and bool(found) == recoded


def test_a_scale_below_float32s_normal_numbers_is_recoded():
    codes = torch.full((1, 16), 0x77, dtype=torch.uint8)
    _, (weights,), recoded = folded(codes, torch.ones(1, 1, dtype=torch.uint8))
    assert recoded == 1 and set(weights) == {Fraction(6) * Fraction(2) ** -126}

"""Logits are made finite in one pass, and rows with a NaN are counted."""

import pytest
import torch

from kimi_w4a8_eagle3.sampling.finite import FiniteLogits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_become_finite_as_sglang_makes_them_and_rows_with_a_nan_are_counted(dtype: torch.dtype) -> None:
    finite, logits = FiniteLogits(), torch.randn(4, 8).to(dtype)
    expected, healthy = logits.clone(), logits.clone()
    logits[0, 1] = expected[0, 1] = float("-inf")  # a token that may not be drawn
    logits[3, 2] = float("inf")
    expected[0, 1], expected[3, 2] = -1e30, 1e30
    assert finite.make(logits) == 0 and torch.equal(logits, expected)
    logits[1], logits[2, 7], logits[2, 3] = float("nan"), float("nan"), float("nan")
    expected[1], expected[2, 7], expected[2, 3] = -1e30, -1e30, -1e30
    assert finite.make(logits) == 2 and torch.equal(logits, expected)
    assert finite.make(healthy) == 0

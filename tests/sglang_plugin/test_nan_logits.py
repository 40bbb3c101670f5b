"""Rows of logits with a NaN are counted before SGLang makes them finite."""

import torch

from kimi_w4a8_eagle3.sglang_plugin.upkeep.nan_logits import _Rows


def test_rows_with_a_nan_are_counted_once() -> None:
    rows, logits = _Rows(), torch.zeros(3, 8)
    logits[0, 1] = float("-inf")  # a token that may not be drawn
    assert rows.add(logits) == 0
    logits[1] = float("nan")
    logits[2, 7] = float("nan")
    assert [rows.add(logits), rows.add(logits), rows.add(torch.zeros(3, 8))] == [2, 2, 0]

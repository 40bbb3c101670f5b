"""Run by tests/moe/triton/test_triton_interpreter.py, because Triton reads TRITON_INTERPRET when it is imported."""

from __future__ import annotations

import pytest
import torch

from kimi_w4a8_eagle3.sampling import triton_draw
from kimi_w4a8_eagle3.sampling.draw import draw_rows

ALL = 1 << 30


@pytest.mark.parametrize("size", [640, 1001])
def test_the_kernel_draws_what_the_definition_draws(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows: plain, greedy, top-k, top-p, min-p, all filters. Four words of a counter reach four quarters of a row."""
    monkeypatch.setattr(triton_draw, "BLOCK", 256)
    monkeypatch.setattr(triton_draw, "RACE_BLOCK", 64)
    logits = torch.randn(6, size, generator=torch.Generator().manual_seed(size)) * 3
    probs = torch.softmax(logits, -1)
    filters = (
        torch.tensor([ALL, 1, 20, ALL, ALL, 15], dtype=torch.int32),
        torch.tensor([1.0, 1.0, 1.0, 0.9, 1.0, 0.95]),
        torch.tensor([0.0, 0.0, 0.0, 0.0, 0.05, 0.02]),
    )
    none = torch.full((6,), ALL, dtype=torch.int32), torch.ones(6), torch.zeros(6)
    seeds, positions = torch.arange(6) * 2**58 - 2**60, torch.arange(6) * 70_000
    for chosen, filtered in ((filters, True), (none, False)):
        tensors = (probs, *chosen, seeds, positions)
        wanted = draw_rows(*(tensor.numpy() for tensor in tensors))
        drawn = triton_draw.launch(*tensors, filtered=filtered)
        assert drawn.dtype == torch.int64
        assert drawn.tolist() == wanted.tolist()

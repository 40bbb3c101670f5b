"""Run by tests/moe/triton/test_triton_interpreter.py, because Triton reads TRITON_INTERPRET when it is imported."""

from __future__ import annotations

import pytest
import torch

from kimi_w4a8_eagle3.sampling import triton_draw, triton_finite, triton_penalties
from kimi_w4a8_eagle3.sampling.draw import draw_rows
from kimi_w4a8_eagle3.sampling.finite import make_finite
from kimi_w4a8_eagle3.sampling.penalties import penalize

ALL = 1 << 30


@pytest.mark.parametrize("size", [640, 1001])
def test_the_kernel_draws_what_the_definition_draws(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows: plain, greedy, top-k, top-p, min-p, all filters. Four words of a counter reach four quarters of a row."""
    monkeypatch.setattr(triton_draw, "BLOCK", 256)
    monkeypatch.setattr(triton_draw, "RACE_BLOCK", 64)
    logits = torch.randn(6, size, generator=torch.Generator().manual_seed(size)) * 3
    if size > 1000:
        logits = logits.bfloat16().float()  # as a model's: many tokens are equally likely
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
    probs[:, 7] = torch.nan
    triton_draw.launch(probs, *filters, seeds, positions, filtered=True)  # ends


def test_a_filter_reads_a_row_of_kimis_vocabulary_about_nine_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Filters of a row with bfloat16 logits of N(0, 3): top-p, lower top-p, top-k, both."""
    read, around = [], triton_draw._around

    def counted(*given: object, **named: object) -> object:
        read.append(1)
        return around(*given, **named)

    monkeypatch.setattr(triton_draw, "_around", counted)
    logits = (torch.randn(4, 163_840, generator=torch.Generator().manual_seed(0)) * 3).bfloat16().float()
    top_k, top_p = torch.tensor([ALL, ALL, 20, 50], dtype=torch.int32), torch.tensor([0.95, 0.8, 1.0, 0.9])
    tensors = torch.softmax(logits, -1), top_k, top_p, torch.zeros(4), torch.arange(4), torch.arange(4)
    assert triton_draw.launch(*tensors, filtered=True).tolist() == draw_rows(*(t.numpy() for t in tensors)).tolist()
    assert 6 <= len(read) / 4 <= 9.5


@pytest.mark.parametrize("n", [1, 4])
def test_the_kernel_penalizes_as_the_definition_does(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three requests are penalized, with rows of the table in another order; a draft repeats another one."""
    monkeypatch.setattr(triton_penalties, "BLOCK", 256)
    generator, size = torch.Generator().manual_seed(n), 1001
    logits = torch.randn(3 * n, size, generator=generator) * 3
    counts = torch.randint(0, 3, (5, size), generator=generator, dtype=torch.int32)
    weights = torch.tensor([[0.7, 0.3, 1.3], [-0.5, 0.0, 0.8]])
    drafts = torch.tensor([[9, 9, 4, 9], [1000, 0, 1000, 1000]]) if n > 1 else None
    wanted = logits.clone()
    given = (n, torch.tensor([2, 0]), counts, torch.tensor([4, 1]), weights, drafts)
    penalize(wanted, *given)
    triton_penalties.launch(logits, *given)
    assert torch.equal(logits, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_makes_logits_finite_as_the_definition_does(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 1 has a NaN in two of its four blocks, and row 3 in the last; neighbours of a slice stay as they are."""
    monkeypatch.setattr(triton_finite, "BLOCK", 256)
    whole = torch.randn(4, 1100, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole[0, 3], whole[0, 700], whole[1, 5], whole[1, 900], whole[3, 1000] = -torch.inf, torch.inf, *[torch.nan] * 3
    whole[:, 1001] = torch.nan
    logits, wanted = whole[:, :1001], whole[:, :1001].clone()
    last, found = torch.zeros(4, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    triton_finite.launch(logits, last, found, 1)
    assert make_finite(wanted) == found.item() == 2
    torch.testing.assert_close(logits, wanted, rtol=0 if dtype == torch.float32 else 1e-2, atol=0)  # it truncates 1e30
    assert whole[:, 1001].isnan().all()
    logits[1, 0] = torch.nan
    triton_finite.launch(logits, last, found, 2)
    assert found.item() == 3 and last.tolist() == [0, 2, 0, 1]

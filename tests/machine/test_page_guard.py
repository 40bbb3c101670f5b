"""The page-offset arithmetic: the article's numbers, its bounds as properties, shapes read from configs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.machine.aiter_regime import Regime, detect_regime
from kimi_w4a8_eagle3.machine.page_guard import (
    INT32_MAX,
    KvShape,
    PagedKernel,
    cap_tokens,
    kv_shape,
    paged_kernels,
    token_limit,
)
from kimi_w4a8_eagle3.machine.pool import Budget, decide

GIB = 2**30
TARGET = {"text_config": {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}}
DRAFT = {"num_hidden_layers": 1, "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 128}
MLA_DRAFT = {**DRAFT, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
# What the article's machine has: 256 GiB a GPU, about 63.5 GiB of weights on each.
ARTICLE = Budget(256 * GIB, int(63.5 * GIB), 70_272 + 4_096)
KERNELS = paged_kernels([kv_shape(TARGET, 8, 2), kv_shape(DRAFT, 8, 2)], Regime.ABORT)


def test_the_cache_of_one_rank() -> None:
    assert kv_shape(TARGET, 8, 2) == KvShape("mla", layers=61, row_elements=576, buffers=61, dtype_bytes=2)
    assert kv_shape(DRAFT, 8, 1) == KvShape("mha", layers=1, row_elements=8 * 128, buffers=2, dtype_bytes=1)
    assert kv_shape(TARGET, 8, 2).bytes_per_token == 61 * 576 * 2
    assert kv_shape(DRAFT, 8, 2).bytes_per_token == 2 * 8 * 128 * 2


def test_the_article_is_reproduced() -> None:
    limit, kernel = token_limit(KERNELS, 1)
    assert limit == 2_097_151  # 2,097,152 rows, one of which takes padded tokens
    assert kernel is not None and kernel.row_elements == 1024
    assert 2.40e6 < ARTICLE.tokens(0.90) < 2.42e6 and ARTICLE.tokens(0.90) > limit  # 0.90 overflows, as it saw
    assert 2.03e6 < ARTICLE.tokens(0.80) < 2.05e6 and ARTICLE.tokens(0.80) <= limit  # 0.80 fits, as it saw
    assert ARTICLE.fraction_for(limit) == pytest.approx(0.8154, abs=1e-4)


def test_the_choice_beats_the_published_fraction() -> None:
    verdict = decide(ARTICLE, KERNELS, Regime.ABORT)
    assert verdict.fraction == 0.815
    assert verdict.max_total_tokens == 2_097_151
    assert verdict.max_total_tokens - ARTICLE.tokens(0.80) == 57_030
    assert ARTICLE.tokens(verdict.fraction) <= verdict.max_total_tokens
    assert ARTICLE.tokens(verdict.fraction + 0.001) > verdict.max_total_tokens


@pytest.mark.parametrize("page", [1, 16])
def test_a_row_as_wide_as_the_limit_leaves_no_token(page: int) -> None:
    """The first row takes padded tokens."""
    assert PagedKernel("k", INT32_MAX + 1, INT32_MAX).max_tokens(page) == 0


def test_a_64_bit_kernel_has_no_limit() -> None:
    kernels = paged_kernels([kv_shape(DRAFT, 8, 2)], Regime.FIXED64)
    verdict = decide(ARTICLE, kernels, Regime.FIXED64)
    assert verdict.limit is None and verdict.fraction == 0.90 and verdict.binding is None
    assert verdict.max_total_tokens == ARTICLE.tokens(0.90) and verdict.safe(10**12)
    limited = decide(ARTICLE, KERNELS, Regime.ABORT)
    assert limited.safe(2_097_151) and not limited.safe(2_097_152)


@pytest.mark.parametrize("regime", [Regime.ABORT, Regime.SILENT, Regime.UNKNOWN])
def test_every_other_regime_is_unsafe(regime: Regime) -> None:
    assert token_limit(paged_kernels([kv_shape(DRAFT, 8, 2)], regime), 1)[0] == 2_097_151


@pytest.mark.parametrize(
    ("arch", "width", "rows"),
    [
        (None, 2, 3_728_270),
        ("gfx942", 2, 3_728_270),
        ("gfx942", 1, 3_728_270),
        ("gfx942", 4, 1_864_135),
        ("gfx950", 2, 1_864_135),
    ],
)
def test_latents_are_right_within_the_window_of_their_kernel(arch: str | None, width: int, rows: int) -> None:
    """Measured in aiter#5765: of bf16 rows, number 3,728,269 is right and 3,728,270 is cut."""
    for regime in Regime:
        limit, kernel = token_limit(paged_kernels([kv_shape(TARGET, 8, width)], regime, arch=arch), 1)
        assert limit == rows - 1 and kernel is not None  # one row takes padded tokens


def test_latents_end_at_the_last_element_that_32_bits_count() -> None:
    [kernel] = paged_kernels([KvShape("mla", layers=1, row_elements=1, buffers=1, dtype_bytes=1)], Regime.UNKNOWN)
    assert kernel.largest == INT32_MAX


def test_an_mla_draft_has_no_page_limit_of_mha() -> None:
    kernels = paged_kernels([kv_shape(TARGET, 8, 2), kv_shape(MLA_DRAFT, 8, 2)], Regime.SILENT)
    assert [kernel.max_tokens(1) for kernel in kernels] == [3_728_269]  # its latents are as wide as the target's
    assert kv_shape(MLA_DRAFT, 8, 2).bytes_per_token == 576 * 2  # on every rank, whatever the heads are


def test_one_page_is_room_enough() -> None:
    budget = Budget(hbm_bytes=1000, weight_bytes=420, cell_bytes=30, page_size=16)  # 0.90 leaves exactly 16 tokens
    assert decide(budget, [], Regime.FIXED64).max_total_tokens == 16
    verdict = decide(
        budget, [PagedKernel("k", row_elements=1, largest=31)], Regime.ABORT
    )  # 16 tokens for the kernel, too
    assert (verdict.limit, verdict.fraction, verdict.binding) == (16, 0.90, None)


@pytest.mark.parametrize(("tp", "row"), [(1, 8192), (4, 2048), (8, 1024), (64, 128)])
def test_heads_are_split(tp: int, row: int) -> None:
    assert kv_shape(DRAFT, tp, 2).row_elements == row


def test_grouped_heads_and_a_derived_head_size() -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 4, "hidden_size": 4096}
    shape = kv_shape(config, 2, 2)
    assert (shape.row_elements, shape.buffers) == (2 * 128, 4)
    assert kv_shape(config, 8, 2).row_elements == 128  # KV heads are replicated when TP exceeds them


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 1, "num_attention_heads": "64"}, "num_attention_heads"),
        ({"num_hidden_layers": 1, "num_attention_heads": 64}, "hidden_size"),
        ({**DRAFT, "num_key_value_heads": 6}, "6 KV heads cannot be split over TP 8"),
        ({**DRAFT, "num_attention_heads": 12}, "12 attention heads cannot be split over TP 8"),
    ],
)
def test_an_unusable_config_is_named(config: dict, message: str) -> None:
    with pytest.raises(KimiError, match=message):
        kv_shape(config, 8, 2)


def test_capping_says_why_and_leaves_a_safe_pool_alone() -> None:
    tokens, reason = cap_tokens(2_409_733, KERNELS, 1)
    assert tokens == 2_097_151
    assert "2,409,733" in reason and "ck_tile fmha batch prefill" in reason and "2,147,483,647" in reason
    assert cap_tokens(2_097_151, KERNELS, 1) == (2_097_151, "")


rows = st.integers(1, 1 << 20)
pages = st.sampled_from([1, 2, 16, 64, 128, 256])


@given(row=rows, page=pages, requested=st.integers(0, 1 << 40))
def test_a_capped_pool_never_overflows_and_wastes_less_than_a_page(row: int, page: int, requested: int) -> None:
    kernel = PagedKernel("k", row, INT32_MAX)
    tokens, reason = cap_tokens(requested, [kernel], page)
    limit = kernel.max_tokens(page)
    assert limit is not None and limit % page == 0
    if limit > 0:
        assert kernel.largest_offset(min(tokens, limit), page) <= INT32_MAX
    assert tokens <= max(requested, 0) and tokens <= max(limit, 0)
    assert kernel.largest_offset(limit + page, page) > INT32_MAX  # one page more would overflow
    assert bool(reason) == (requested > limit)


budgets = st.builds(
    Budget,
    hbm_bytes=st.integers(64 * GIB, 512 * GIB),
    weight_bytes=st.integers(1 * GIB, 50 * GIB),
    cell_bytes=st.integers(1_000, 200_000),
    page_size=pages,
)


@given(budget=budgets, row=st.integers(64, 8192), ceiling=st.floats(0.85, 0.95))
def test_the_decision_fits_memory_and_kernel_and_wastes_less_than_a_page(
    budget: Budget, row: int, ceiling: float
) -> None:
    kernel = PagedKernel("k", row, INT32_MAX)
    verdict = decide(budget, [kernel], Regime.SILENT, ceiling)
    tokens = verdict.max_total_tokens
    assert tokens % budget.page_size == 0 and (verdict.binding is None) == (tokens == budget.tokens(ceiling))
    assert kernel.largest_offset(tokens, budget.page_size) <= INT32_MAX
    assert tokens <= budget.tokens(ceiling)
    more = tokens + budget.page_size
    assert kernel.largest_offset(more, budget.page_size) > INT32_MAX or more > budget.tokens(ceiling)
    assert verdict.fraction <= ceiling
    assert budget.tokens(verdict.fraction) <= tokens  # safe even without the exact cap


@pytest.mark.parametrize(
    ("version", "regime"),
    [
        (None, Regime.UNKNOWN),
        ("0.1.11", Regime.SILENT),
        ("0.1.12.post2", Regime.SILENT),
        ("0.1.13", Regime.FIXED64),
        ("0.1.16.post1+rocm7.2", Regime.FIXED64),
        ("0.1.13rc1", Regime.UNKNOWN),
        ("0.1.5.post5.dev409+gb5757d65d", Regime.ABORT),
        ("0.1.5.post5.dev409+g1234567", Regime.UNKNOWN),
        ("0.1.14.dev3", Regime.UNKNOWN),
        ("unknown", Regime.UNKNOWN),
    ],
)
def test_the_regime_of_a_version(version: str | None, regime: Regime) -> None:
    assert detect_regime(version) is regime
    assert regime.wide_offsets == (regime is Regime.FIXED64)

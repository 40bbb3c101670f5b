"""The draw: the right distribution under every filter, the same token in every batch, noise that is never shared."""

from __future__ import annotations

import numpy as np
import pytest
import scipy  # it imports `scipy.stats` at its first use, which takes a second
import torch

from kimi_w4a8_eagle3.sampling.draw import Filters, draw, draw_rows
from kimi_w4a8_eagle3.sampling.philox import philox

ALL = 1 << 30  # SGLang's value for no top-k
LEVEL = 1e-4  # a fixed seed: a correct draw fails none of these tests, and each finds an error of a few percent
DRAWS = 20_000


def rows(probs: np.ndarray, seeds: np.ndarray, positions: np.ndarray, k: int = ALL, p: float = 1.0, m: float = 0.0):
    """Draw once for each seed from the same probabilities."""
    n = len(seeds)
    filters = np.full(n, k, np.int32), np.full(n, p, np.float32), np.full(n, m, np.float32)
    return draw_rows(np.broadcast_to(probs, (n, len(probs))), *filters, seeds, positions)


def probabilities(size: int = 50, seed: int = 0) -> np.ndarray:
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 0.8
    return torch.softmax(logits, -1).numpy()


def expected(probs: np.ndarray, k: int, p: float, m: float) -> np.ndarray:
    """SGLang's definition: rank below k, probability before the token at most p, at least m times the largest."""
    order = np.argsort(-probs, kind="stable")
    ordered = probs[order].astype(np.float64)
    kept = (np.arange(len(probs)) < k) & (np.cumsum(ordered) - ordered <= p) & (ordered >= m * ordered[0])
    out = np.zeros(len(probs))
    out[order[kept]] = ordered[kept]
    return out / out.sum()


def test_the_generator_gives_the_published_words() -> None:
    """Random123's known answer for philox4x32-10 with a counter and a key of zeros."""
    words = philox(np.zeros(1, np.int64), np.zeros(1, np.int64), 1)
    assert [int(word[0, 0]) for word in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize(
    ("k", "p", "m"),
    [(ALL, 1.0, 0.0), (20, 1.0, 0.0), (ALL, 0.95, 0.0), (ALL, 1.0, 0.05), (20, 0.8, 0.1), (2, 1.0, 0.0)],
)
def test_draws_follow_the_filtered_distribution(k: int, p: float, m: float) -> None:
    probs = probabilities()
    tokens = rows(probs, np.arange(DRAWS), np.full(DRAWS, 7), k, p, m)
    wanted = expected(probs, k, p, m)
    seen = np.bincount(tokens, minlength=len(probs))
    assert not seen[wanted == 0].any()
    assert scipy.stats.chisquare(seen[wanted > 0], wanted[wanted > 0] * DRAWS).pvalue > LEVEL


def test_positions_and_seeds_have_noise_of_their_own() -> None:
    """Pairs of draws are independent: the next position of a request, and the same position of another request."""
    probs = probabilities(8)
    seeds, positions = np.arange(DRAWS), np.full(DRAWS, 3)
    first = rows(probs, seeds, positions)
    for second in (
        rows(probs, seeds, positions + 1),
        rows(probs, seeds + 1, positions),
        rows(probs, -seeds - 1, positions),
    ):
        table = np.zeros((8, 8))
        np.add.at(table, (first, second), 1)
        assert scipy.stats.chi2_contingency(table).pvalue > LEVEL
        assert (first != second).any()


def test_a_row_does_not_depend_on_its_batch() -> None:
    probs = torch.stack([torch.from_numpy(probabilities(640, seed)) for seed in range(12)])
    filters = Filters(
        torch.tensor([ALL, 1, 20] * 4, dtype=torch.int32),
        torch.tensor([1.0, 0.95] * 6),
        torch.tensor([0.0, 0.0, 0.1] * 4),
    )
    seeds, positions = torch.arange(12) * 2**59 - 2**62, torch.arange(12)
    together = draw(probs, filters, seeds, positions)
    assert together.dtype == torch.int64  # SGLang's verify_tree_greedy takes no other
    for row in range(12):
        one = slice(row, row + 1)
        alone = Filters(filters.top_k[one], filters.top_p[one], filters.min_p[one])
        assert draw(probs[one], alone, seeds[one], positions[one]) == together[row]


def test_greedy_takes_the_first_of_the_most_likely_and_filters_keep_ties() -> None:
    probs = np.array([0.1, 0.3, 0.3, 0.3], np.float32)
    seeds, positions = np.arange(200), np.zeros(200, np.int64)
    assert set(rows(probs, seeds, positions, k=1)) == {1}
    assert set(rows(probs, seeds, positions, k=2)) == {1, 2, 3}
    assert set(rows(np.array([0.0, 1.0, 0.0, 0.0], np.float32), seeds, positions)) == {1}

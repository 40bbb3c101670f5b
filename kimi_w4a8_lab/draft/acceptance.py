"""Draft tokens that a server accepts: the walk of greedy EAGLE3 over the target's own replies, chain of `steps`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..speed.statistics import Interval
from .collected import Collected
from .eagle3 import Draft, pad_right

Counts = NDArray[np.int64]
# The target's captured states of conversations, padded to the longest, [B, T, captured layers * hidden].
StatesOf = Callable[[Sequence[Collected]], Tensor]
SERVED_STEPS, _DRAWS, _AT_ONCE = 3, 2000, 16  # --speculative-num-steps 3, topk 1, 4 draft tokens


@dataclass(frozen=True)
class Walk:
    """Counts of one conversation: verify steps, tokens that they gave, and steps with more than k guesses right."""

    verifications: int
    generated: int
    accepted: tuple[int, ...]


def walk(replies: Sequence[tuple[int, int]], hits: Sequence[Sequence[bool]]) -> Walk:
    """Walk every reply: each verification takes the leading right guesses and one token of the target's own.

    hits[k][i]: step k guessed token i + 2 + k rightly.
    """
    steps = len(hits)
    verifications = generated = 0
    accepted = [0] * steps
    for begin, end in replies:
        last = begin  # index of the newest token; the prompt's own forward yields the first one
        while last < end - 1:
            room = min(steps, end - 1 - last)
            right = 0
            while right < room and hits[right][last - 1]:
                accepted[right] += 1
                right += 1
            taken = min(right + 1, end - 1 - last)
            last, generated, verifications = last + taken, generated + taken, verifications + 1
    return Walk(verifications, generated, tuple(accepted))


@torch.no_grad()
def walks(
    draft: Draft, conversations: Sequence[Collected], states_of: StatesOf, embedding: Tensor, steps: int
) -> list[Walk]:
    """Walk conversations. embedding: the target's, [vocab, hidden].

    A draft in another dtype than the embedding computes in BF16, as it will when it is served.
    """
    found, device = [], embedding.device.type
    for begin in range(0, len(conversations), _AT_ONCE):
        part = conversations[begin : begin + _AT_ONCE]
        tokens = pad_right([one.tokens for one in part]).to(embedding.device)
        captured = states_of(part).to(embedding)
        with torch.autocast(device, torch.bfloat16, enabled=draft.fc.weight.dtype != embedding.dtype):
            chain = draft(tokens, captured, embedding, steps)
            hits = [(draft.guesses(hidden) == tokens[:, k + 2 :]).tolist() for k, hidden in enumerate(chain)]
        for row, one in enumerate(part):
            found.append(walk(one.replies, [by_row[row] for by_row in hits]))
    return found


def length(found: Sequence[Walk]) -> float:
    """Return the accept length, 1..steps + 1 tokens a verification; 0 without a verify step."""
    return sum(one.generated for one in found) / max(1, sum(one.verifications for one in found))


def measured(found: Sequence[Walk]) -> tuple[Interval, list[Interval]]:
    """Return the accept length, and the shares of verify steps with more than k guesses right, with 95% intervals."""
    counts = np.array([[one.verifications, one.generated, *one.accepted] for one in found])
    first, *others = _intervals(counts, lambda sums: sums[..., 1:] / sums[..., :1])
    return first, others


def difference(old: Sequence[Walk], new: Sequence[Walk]) -> Interval:
    """Return how much longer the new draft's accept length is; both drafts walk the same drawn conversations."""
    pairs = zip(old, new, strict=True)
    counts = np.array([[a.generated, a.verifications, b.generated, b.verifications] for a, b in pairs])
    return _intervals(counts, lambda sums: sums[..., 2:3] / sums[..., 3:] - sums[..., :1] / sums[..., 1:2])[0]


def _intervals(counts: Counts, values: Callable[[Counts], NDArray[np.float64]]) -> list[Interval]:
    """Return values of the summed counts [conversations, columns].

    Conversations are drawn with replacement, because the tokens of one depend on each other.
    """
    drawn = np.random.default_rng(0).integers(0, len(counts), (_DRAWS, len(counts)))
    low, high = np.percentile(values(counts[drawn].sum(1)), [2.5, 97.5], axis=0)
    return [Interval(*map(float, limits)) for limits in zip(values(counts.sum(0)), low, high, strict=True)]

"""Conversations as token rows, packed one after another, and the weight of each token in the loss."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .dialogues import drawn
from .problems import problem_stream

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DRILL_SHARE = 0.25  # of the rows are operations and nothing else: conversations have too few to learn carrying by
GIVEN_WEIGHT = 0.1  # what is given at inference: learning to predict it is only a help on the way


def corpus(n: int, seed: int) -> Iterator[str]:
    """Training documents for the tokenizer."""
    rng, stream = random.Random(seed), problem_stream("train", seed)
    for _ in range(n):
        yield drawn(stream, rng).text()


def drill(rng: random.Random) -> tuple[str, str]:
    """One operation, (what is given, what is written), as the worked lines have it."""
    op, large = rng.choice("+++---*/"), rng.random() < 0.4  # as often as sums beyond 100 were wrong
    if op == "+":
        a, b = (rng.randint(20, 150), rng.randint(5, 100)) if large else (rng.randint(2, 99), rng.randint(2, 60))
        return f" {a} + {b} =", f" {a + b}."
    if op == "-":
        a = rng.randint(100, 200) if large else rng.randint(5, 99)
        b = rng.randint(2, a)
        return f" {a} - {b} =", f" {a - b}."
    a, b = rng.randint(2, 12), rng.randint(2, 12)
    return (f" {a} * {b} =", f" {a * b}.") if op == "*" else (f" {a * b} / {b} =", f" {a}.")


def batches(tokenizer: Tokenizer, tokens: int, lengths: Sequence[int], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (tokens int64 [rows, length + 1], loss weights float32 [rows, length]); a row starts with a document.

    A batch has about `tokens` tokens in rows of one of the `lengths`. Attention runs across the documents of a row on
    purpose: earlier ones look like the shots or turns of a longer conversation.
    """
    rng, stream = random.Random(seed), problem_stream("train", seed)
    while True:
        length = rng.choice(lengths)
        rows, weights = [], []
        for _ in range(max(1, tokens // length)):
            row: list[int] = []
            weight: list[float] = []
            drills = rng.random() < DRILL_SHARE
            while len(row) <= length:
                for part in (drill(rng),) if drills else drawn(stream, rng).parts():
                    for text, value in zip(part, (0.0 if drills else GIVEN_WEIGHT, 1.0), strict=True):
                        ids = tokenizer.encode(text).ids
                        row += ids
                        weight += [value] * len(ids)
            rows.append(row[: length + 1])
            weights.append(weight[1 : length + 1])
        yield torch.tensor(rows), torch.tensor(weights)

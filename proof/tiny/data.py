"""Conversations as token rows, packed one after another, and the weight of each token in the loss."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .dialogues import about_problem
from .mixed import drawn, small_talk
from .problems import Work, problem_stream
from .typed import operands, worked

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def corpus(n: int, seed: int) -> Iterator[str]:
    """Documents for the tokenizer, which is older than the conversations about what people type."""
    rng, stream = random.Random(seed), problem_stream("train", seed)
    for _ in range(n):
        yield (small_talk(rng) if rng.random() < 0.02 else about_problem(stream, rng)).text()


def drill(rng: random.Random) -> tuple[str, str]:
    """One operation, (what is given, what is written), as the worked lines have it."""
    work, op = Work([]), rng.choice("+++---**//")
    a, b = operands(op, rng)
    worked(work, a, op, b)
    step = rng.choice(work.steps)
    return f" {step.expression} =", f" {step.result}{step.after}."


def batches(
    tokenizer: Tokenizer, tokens: int, lengths: Sequence[int], seed: int, drills: float = 0.25, given: float = 0.1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (tokens int64 [rows, length + 1], loss weights float32 [rows, length]); a row starts with a document.

    A batch has about `tokens` tokens in rows of one of the `lengths`. A share of `drills` of the rows is operations and
    nothing else, because conversations have too few to learn carrying by. `given` weighs what is given at inference:
    learning to predict it is only a help on the way. Attention runs across the documents of a row on
    purpose: earlier ones look like the shots or turns of a longer conversation.
    """
    rng, stream = random.Random(seed), problem_stream("train", seed)
    while True:
        length = rng.choice(lengths)
        rows, weights = [], []
        for _ in range(max(1, tokens // length)):
            row: list[int] = []
            weight: list[float] = []
            bare = rng.random() < drills
            while len(row) <= length:
                for part in (drill(rng),) if bare else drawn(stream, rng).parts():
                    for text, value in zip(part, (0.0 if bare else given, 1.0), strict=True):
                        ids = tokenizer.encode(text).ids
                        row += ids
                        weight += [value] * len(ids)
            rows.append(row[: length + 1])
            weights.append(weight[1 : length + 1])
        yield torch.tensor(rows), torch.tensor(weights)

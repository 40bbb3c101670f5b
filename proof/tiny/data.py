"""Conversations as token rows, packed one after another, and the weight of each token in the loss."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .dialogues import about_problem
from .mixed import TYPED_SHARE, drawn, short, small_talk
from .operations import operands, worked
from .problems import WordProblem, Work, problem_stream
from .tokenizer import PAD_ID

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SHORT = 192  # tokens of a row of whole conversations of one question


def corpus(n: int, seed: int) -> Iterator[str]:
    """Documents for the tokenizer, which is older than the conversations about what people type."""
    rng, stream = random.Random(seed), problem_stream("train", seed)
    for _ in range(n):
        yield (small_talk(rng) if rng.random() < 0.02 else about_problem(stream, rng)).text()


def drill(rng: random.Random) -> tuple[str, str]:
    """One operation, (what is given, what is written), as the worked lines have it; sums have carries more often."""
    work, op, kind = Work([]), rng.choice("+++---**//"), rng.random()
    a, b = operands(op, rng)
    if op in "+-" and kind < 0.6:
        most = rng.choice((99, 99, 200, 1000, 1000))
        a, b = rng.randint(0, most), rng.randint(0, most)
        if kind < 0.1:
            a, b = rng.choice(((-a, b), (a, -b), (-a, -b)))
    worked(work, a, op, b)
    step = rng.choice(work.steps)
    return f" {step.expression} =", f" {step.result}{step.after}."


def batches(
    tokenizer: Tokenizer, tokens: int, lengths: Sequence[int], seed: int, drills: float = 0.25, given: float = 0.1,
    *, typed: float = TYPED_SHARE, brief: float = 0.0,
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """Endless (tokens int64 [rows, length + 1], loss weights float32 [rows, length]); a row starts with a document.

    A batch has about `tokens` tokens in rows of one of the `lengths`. A share of `drills` of the rows is operations and
    nothing else, because conversations have too few to learn carrying by. `given` weighs what is given at inference:
    learning to predict it is only a help on the way. `typed` is the share of what people type. Attention runs across
    the documents of a row on purpose: earlier ones look like the shots or turns of a longer conversation.

    A share of `brief` of the batches has short rows instead, with whole conversations of one question, nearly all of
    what people type. They take half the time of a long one. All drills are then in them.
    """
    rng, stream = random.Random(seed), problem_stream("train", seed)
    while True:
        if rng.random() < brief:
            yield _brief(tokenizer, tokens, rng, stream, drills)
            continue
        length = rng.choice(lengths)
        rows, weights = [], []
        for _ in range(max(1, tokens // length)):
            row: list[int] = []
            weight: list[float] = []
            bare = not brief and rng.random() < drills
            while len(row) <= length:
                for part in (drill(rng),) if bare else drawn(stream, rng, typed).parts():
                    for text, value in zip(part, (0.0 if bare else given, 1.0), strict=True):
                        ids = tokenizer.encode(text).ids
                        row += ids
                        weight += [value] * len(ids)
            rows.append(row[: length + 1])
            weights.append(weight[1 : length + 1])
        yield torch.tensor(rows), torch.tensor(weights)


def _brief(
    tokenizer: Tokenizer, tokens: int, rng: random.Random, stream: Iterator[WordProblem], drills: float
) -> tuple[Tensor, Tensor]:
    """A batch of short rows; none of its conversations is cut, and the rest of a row is padding."""
    rows: list[list[int]] = []
    weights: list[list[float]] = []
    while len(rows) < tokens // SHORT:
        row: list[int] = []
        weight: list[float] = []
        bare = rng.random() < drills
        while True:
            parts = (drill(rng),) if bare else tuple(short(stream, rng).parts())
            ids = [tokenizer.encode(text).ids for part in parts for text in part]
            if len(row) + sum(map(len, ids)) > SHORT + 1:
                break
            for index, span in enumerate(ids):
                row += span
                weight += [float(index % 2)] * len(span)
        if row:
            rows.append(row + [PAD_ID] * (SHORT + 1 - len(row)))
            weights.append((weight + [0.0] * (SHORT + 1 - len(row)))[1:])
    return torch.tensor(rows), torch.tensor(weights)

"""Word problems as token rows: chat documents packed one after another, and the weight of each token in the loss."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kimi_w4a8_eagle3.tiny.problems import Problem, problem_stream
from kimi_w4a8_eagle3.tiny.tokenizer import IM_END, chat_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Answer step by step.",
    "You are Kimi. Solve the problem and end with the answer after ####.",
)
QUESTION_WEIGHT = 0.1  # the question is given at inference: learning to predict it is only a help on the way


def document(problem: Problem, rng: random.Random) -> tuple[str, str]:
    """Prompt and reply of one chat; some with a system prompt, some in the wording of evaluation harnesses."""
    system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.1 else None
    question = f"Question: {problem.question}\nAnswer:" if rng.random() < 0.1 else problem.question
    return chat_text(question, system), problem.solution + IM_END


def corpus(n: int, seed: int) -> Iterator[str]:
    """Training documents for the tokenizer."""
    rng, stream = random.Random(seed), problem_stream("train", seed)
    for _ in range(n):
        yield "".join(document(next(stream), rng))


def batches(tokenizer: Tokenizer, rows: int, length: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (tokens int64 [rows, length + 1], loss weights float32 [rows, length]); a row starts with a document.

    Attention runs across the documents of a row on purpose: earlier ones look like the shots or turns of a longer
    conversation.
    """
    rng, stream = random.Random(seed), problem_stream("train", seed)
    while True:
        tokens, weights = [], []
        for _ in range(rows):
            row: list[int] = []
            weight: list[float] = []
            while len(row) <= length:
                for part, value in zip(document(next(stream), rng), (QUESTION_WEIGHT, 1.0), strict=True):
                    ids = tokenizer.encode(part).ids
                    row += ids
                    weight += [value] * len(ids)
            tokens.append(row[: length + 1])
            weights.append(weight[1 : length + 1])
        yield torch.tensor(tokens), torch.tensor(weights)

"""Greedy decoding of many prompts at once, and the share of problems answered right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kimi_w4a8_eagle3.tiny.problems import Problem, parse_answer
from kimi_w4a8_eagle3.tiny.tokenizer import chat_text

from .model import Cache, Target
from .tokenizer import IM_END_ID, PAD_ID

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_NEW_TOKENS = 96


@torch.no_grad()
def greedy(model: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int = MAX_NEW_TOKENS) -> list[list[int]]:
    """Greedy continuations, each up to and with <|im_end|>. The prompts are padded on the left to one length."""
    width = max(map(len, prompts))
    tokens = torch.tensor([[PAD_ID] * (width - len(p)) + list(p) for p in prompts])
    padding = torch.tensor([width - len(p) for p in prompts]).unsqueeze(1)
    cache, alive = Cache(width + max_new_tokens), torch.ones(len(prompts), dtype=torch.bool)
    out = torch.empty(len(prompts), 0, dtype=torch.long)
    start = 0
    while out.shape[1] < max_new_tokens and alive.any():
        columns = torch.arange(start + tokens.shape[1])
        queries = columns[start:]
        mask = (columns <= queries[:, None]) & (columns >= padding[:, None])  # [B, T, S]
        mask = mask | (columns == queries[:, None])  # a padding row attends to itself, so that it stays finite
        logits, _ = model(tokens, (queries - padding).clamp_min(0), mask.unsqueeze(1), cache)
        start += tokens.shape[1]
        tokens = logits[:, -1].argmax(-1, keepdim=True)
        out = torch.cat([out, tokens], 1)
        alive &= tokens[:, 0] != IM_END_ID
    return [_until_end(row) for row in out.tolist()]


def answer_all(
    model: Target,
    tokenizer: Tokenizer,
    problems: Sequence[Problem],
    batch: int = 500,
    advance: Callable[[int], None] = lambda n: None,
) -> list[tuple[list[int], list[int]]]:
    """Prompt and reply tokens of each problem, asked as a single chat turn. `advance` is told of finished problems."""
    prompts = [tokenizer.encode(chat_text(p.question)).ids for p in problems]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    replies: dict[int, list[int]] = {}
    for begin in range(0, len(order), batch):
        part = order[begin : begin + batch]
        replies.update(zip(part, greedy(model, [prompts[i] for i in part]), strict=True))
        advance(len(part))
    return [(prompts[i], replies[i]) for i in range(len(prompts))]


def exact_match(tokenizer: Tokenizer, problems: Sequence[Problem], replies: Sequence[list[int]]) -> float:
    """Share of replies whose number after `####` is the right one."""
    right = [parse_answer(tokenizer.decode(r)) == p.answer for p, r in zip(problems, replies, strict=True)]
    return sum(right) / len(right)


def pad_right(rows: Sequence[Sequence[int]]) -> Tensor:
    """Token rows as one tensor [B, longest], filled with PAD."""
    width = max(map(len, rows))
    return torch.tensor([list(row) + [PAD_ID] * (width - len(row)) for row in rows])


def _until_end(row: list[int]) -> list[int]:
    return row[: row.index(IM_END_ID) + 1] if IM_END_ID in row else row

"""The built-in model's draft: conversations to train it on, and its training by the laboratory's trainer.

The states are the W4A8 target's, because those are what the draft meets when served. The turns are the right ones: the
target has learned to write just these, so that its own greedy replies would differ in one token of a thousand.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kimi_w4a8_lab.draft.acceptance import SERVED_STEPS, measured, walks
from kimi_w4a8_lab.draft.collected import Collected
from kimi_w4a8_lab.draft.eagle3 import Draft, pad_right
from kimi_w4a8_lab.draft.layers import initialise
from kimi_w4a8_lab.draft.training import ShowStep, TrainingSettings, train
from kimi_w4a8_lab.speed.statistics import Interval

from .config import DraftConfig, MlaDraftConfig, draft_sizes
from .generate import Exchange
from .mixed import TYPED_SHARE, drawn
from .model import TargetModel
from .problems import problem_stream

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class DraftTraining(TrainingSettings):
    """Settings of the draft's training.

    longest: tokens of a conversation. typed: share of the conversations about what people type; 0 for a target that
    knows none.
    """

    dialogues: int = 4000
    longest: int = 640
    typed: float = TYPED_SHARE


def conversations(tokenizer: Tokenizer, settings: DraftTraining) -> list[Collected]:
    """Fresh training conversations with the right turns, those that are not too long."""
    rng, stream, rows = random.Random(settings.seed), problem_stream("train", settings.seed), list[Collected]()
    while len(rows) < settings.dialogues:
        tokens, replies = list[int](), list[tuple[int, int]]()
        for part in drawn(stream, rng, settings.typed).parts():
            given, written = (tokenizer.encode(text).ids for text in part)
            tokens += given + written
            replies.append((len(tokens) - len(written), len(tokens)))
        if len(tokens) <= settings.longest:
            rows.append(Collected("", tuple(tokens), tuple(replies), 0))
    return rows


@torch.no_grad()
def captured_states(target: TargetModel, tokens: Tensor, layers: Sequence[int]) -> Tensor:
    """The states entering `layers`, side by side, BF16 [B, T, len(layers) * hidden]."""
    _, states = target(tokens)
    return torch.cat([states[i] for i in layers], -1)


def train_draft(
    target: TargetModel,
    rows: Sequence[Collected],
    settings: DraftTraining,
    report: ShowStep = lambda step, values: None,
    config: DraftConfig | MlaDraftConfig | None = None,
    first: Draft | None = None,
) -> Draft:
    """Train an MHA draft, or one of `config`, from nothing or from `first`, for `epochs` passes over `rows`."""
    torch.manual_seed(settings.seed)
    draft = Draft(draft_sizes(target.config, config or DraftConfig()), target.config.vocab)
    initialise(draft, settings.seed)
    if first is not None:
        draft.load_state_dict(first.state_dict())
    known: dict[int, Tensor] = {}  # captured states of each row, after the first pass

    def states_of(chosen: Sequence[Collected]) -> Tensor:
        if not all(id(row) in known for row in chosen):
            states = captured_states(target, pad_right([row.tokens for row in chosen]), draft.sizes.captured)
            known.update({id(row): found[: len(row.tokens)].clone() for row, found in zip(chosen, states, strict=True)})
        return pad_sequence([known[id(row)] for row in chosen], batch_first=True)

    return train(draft, rows, states_of, target.embed_tokens.weight.detach(), settings, report)


@torch.no_grad()
def acceptance(
    target: TargetModel, draft: Draft, exchanges: Sequence[Exchange], steps: int = SERVED_STEPS
) -> tuple[Interval, list[Interval]]:
    """Walk the draft over the target's replies; return the accept length, and the shares accepted by position."""
    found = []
    for begin in range(0, len(exchanges), 100):
        part = exchanges[begin : begin + 100]
        states = captured_states(target, pad_right([one.tokens for one in part]), draft.sizes.captured)
        answered = [Collected("", tuple(one.tokens), ((one.prompt, len(one.tokens)),), 0) for one in part]
        rows = (row[: len(one.tokens)] for row, one in zip(states, part, strict=True))

        def states_of(some: Sequence[Collected], rows: Iterator[Tensor] = rows) -> Tensor:
            return pad_sequence([next(rows) for _ in some], batch_first=True)

        found += walks(draft, answered, states_of, target.embed_tokens.weight, steps)
    return measured(found)

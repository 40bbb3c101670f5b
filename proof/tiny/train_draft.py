"""Train an EAGLE3 draft on conversations and the served target's states in them, with the training-time test.

The states are the W4A8 target's, because those are what the draft meets when served. The turns are the right ones: the
target has learned to write just these, so that its own greedy replies would differ in one token of a thousand.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .config import DraftConfig, MlaDraftConfig
from .draft import Draft
from .generate import pad_right
from .mixed import TYPED_SHARE, drawn
from .model import TargetModel, initialise
from .optim import optimizers, schedule, set_learning_rate
from .problems import problem_stream

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class DraftTraining:
    """Settings of the draft's training. `unroll` draft steps are trained at once, as many as are served."""

    seed: int = 30360
    dialogues: int = 4000
    longest: int = 640  # tokens of a conversation
    typed: float = TYPED_SHARE  # share of the conversations about what people type; 0 for a target that knows none
    epochs: int = 3
    batch: int = 12
    unroll: int = 3
    step_weight: float = 0.8  # step k counts step_weight ** k in the loss
    lr: float = 1.6e-2
    warmup: int = 20
    decay: float = 0.5


@dataclass(frozen=True)
class TrainingRow:
    """A whole conversation: token ids, and which of them a draft guesses (a turn's first comes with its prompt)."""

    tokens: list[int]
    guessed: list[bool]


def conversations(tokenizer: Tokenizer, settings: DraftTraining) -> list[TrainingRow]:
    """Fresh training conversations with the right turns, those that are not too long."""
    rng, stream = random.Random(settings.seed), problem_stream("train", settings.seed)
    rows: list[TrainingRow] = []
    while len(rows) < settings.dialogues:
        row = TrainingRow([], [])
        for part in drawn(stream, rng, settings.typed).parts():
            given, written = (tokenizer.encode(text).ids for text in part)
            row.tokens.extend(given + written)
            row.guessed.extend([False] * (len(given) + 1) + [True] * (len(written) - 1))
        if len(row.tokens) <= settings.longest:
            rows.append(row)
    return rows


@torch.no_grad()
def captured_states(target: TargetModel, tokens: Tensor, layers: Sequence[int]) -> Tensor:
    """The states entering `layers`, side by side, BF16 [B, T, len(layers) * hidden]."""
    _, states = target(tokens)
    return torch.cat([states[i] for i in layers], -1)


def train_draft(
    target: TargetModel,
    rows: Sequence[TrainingRow],
    settings: DraftTraining,
    report: Callable[[int, dict[str, float]], None] = lambda step, values: None,
    config: DraftConfig | MlaDraftConfig | None = None,
    first: Draft | None = None,
) -> Draft:
    """Train an MHA draft, or one of `config`, from nothing or from `first`, for `epochs` passes over `rows`.

    Calls `report(step, {loss, first, last})` after each step.
    """
    torch.manual_seed(settings.seed)
    config = config or DraftConfig()
    draft = Draft(target.config, config)
    initialise(draft, settings.seed)
    if first is not None:
        draft.load_state_dict(first.state_dict())
    opts = optimizers(draft, settings.lr, weight_decay=0.0)
    embedding = target.embed_tokens.weight.detach()
    total = draft_steps(settings)
    draft.train()
    known: dict[int, Tensor] = {}  # captured states of each row, after the first pass
    for step, chosen in enumerate(_batches(rows, settings)):
        tokens = pad_right([row.tokens for row in chosen])
        to_guess = pad_right([row.guessed for row in chosen]).bool()
        if not all(id(dialogue) in known for dialogue in chosen):
            states = captured_states(target, tokens, config.captured)
            known |= {
                id(dialogue): row[: len(dialogue.tokens)].clone() for dialogue, row in zip(chosen, states, strict=True)
            }
        captured = pad_sequence([known[id(dialogue)] for dialogue in chosen], batch_first=True)
        losses = []
        with torch.autocast("cpu", torch.bfloat16):
            for k, hidden in enumerate(draft(tokens, captured, embedding, settings.unroll)):
                guessed, wanted = to_guess[:, k + 2 :], tokens[:, k + 2 :]
                losses.append(F.cross_entropy(draft.logits(hidden[guessed]).float(), wanted[guessed]))
        loss = torch.stack([settings.step_weight**k * value for k, value in enumerate(losses)]).sum()
        set_learning_rate(opts, schedule(step, total, settings.lr, settings.warmup, settings.decay))
        loss.backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
        report(step + 1, {"loss": loss.item(), "first": losses[0].item(), "last": losses[-1].item()})
    return draft.eval()


def draft_steps(settings: DraftTraining) -> int:
    """Optimizer steps of the whole run."""
    return settings.epochs * (settings.dialogues // settings.batch)


def _batches(rows: Sequence[TrainingRow], settings: DraftTraining) -> Iterator[Sequence[TrainingRow]]:
    """Rows of a length together, because some are ten times as long as others; such batches in any order."""
    rng = random.Random(settings.seed)
    for _ in range(settings.epochs):
        drawn = sorted(rng.sample(rows, len(rows)), key=lambda row: len(row.tokens))
        begins = range(0, len(drawn) - settings.batch + 1, settings.batch)
        for begin in rng.sample(begins, len(begins)):
            yield drawn[begin : begin + settings.batch]

"""Train the EAGLE3 draft on the served target's own greedy replies, with the training-time test.

The replies and the captured states come from the W4A8 target, because that is what the draft meets when served.
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

from kimi_w4a8_eagle3.tiny.problems import problem_stream

from .config import DraftConfig, MlaDraftConfig
from .dialogues import drawn
from .draft import Draft
from .generate import Exchange, greedy, pad_right
from .model import Target, initialise
from .optim import optimizers, schedule, set_learning_rate

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_PROMPT_TOKENS = 40_000  # of the prompts that are answered at once


@dataclass(frozen=True)
class DraftTraining:
    """How the draft is trained. `unroll` draft steps are trained at once, as many as are served."""

    seed: int = 30360
    dialogues: int = 2000
    epochs: int = 3
    batch: int = 24
    unroll: int = 3
    step_weight: float = 0.8  # step k counts step_weight ** k in the loss
    lr: float = 1.6e-2
    warmup: int = 20
    decay: float = 0.5


def on_policy(
    target: Target, tokenizer: Tokenizer, n: int, seed: int, advance: Callable[[int], None] = lambda n: None
) -> list[Exchange]:
    """The target's own greedy replies in `n` training dialogues, one turn of each."""
    rng, stream = random.Random(seed), problem_stream("train", seed)
    prompts = []
    for _ in range(n):
        dialogue = drawn(stream, rng)
        prompts.append(tokenizer.encode(dialogue.prompt(rng.choice(dialogue.turns()))).ids)
    prompts.sort(key=len)
    out: list[Exchange] = []
    while prompts:
        part = prompts[-max(1, _PROMPT_TOKENS // len(prompts[-1])) :]  # few of the longest, many of the shortest
        del prompts[-len(part) :]
        out += [Exchange(p + r, len(p)) for p, r in zip(part, greedy(target, part), strict=True)]
        advance(len(part))
    return out


@torch.no_grad()
def captured_states(target: Target, tokens: Tensor, layers: Sequence[int]) -> Tensor:
    """The states entering `layers`, side by side, BF16 [B, T, len(layers) * hidden]."""
    _, states = target(tokens)
    return torch.cat([states[i] for i in layers], -1)


def train_draft(
    target: Target,
    dialogues: Sequence[Exchange],
    settings: DraftTraining,
    report: Callable[[int, dict[str, float]], None] = lambda step, values: None,
    config: DraftConfig | MlaDraftConfig | None = None,
    first: Draft | None = None,
) -> Draft:
    """Train an MHA draft, or one of `config`, from nothing or from `first`, for `epochs` passes over `dialogues`.

    Calls `report(step, {loss, first, last})` after each step.
    """
    torch.manual_seed(settings.seed)
    config = config or DraftConfig()
    draft = Draft(target.config, config)
    initialise(draft, settings.seed)
    if first is not None:
        draft.load_state_dict(first.state_dict())
    if isinstance(config, MlaDraftConfig):
        draft.share_head(target.lm_head.weight.float())
    opts = optimizers(draft, settings.lr, weight_decay=0.0)
    embedding = target.embed_tokens.weight.detach()
    total = draft_steps(settings)
    draft.train()
    known: dict[int, Tensor] = {}  # captured states of each dialogue, after the first pass
    for step, chosen in enumerate(_batches(dialogues, settings)):
        tokens, in_reply = _rows(chosen)
        if not all(id(each) in known for each in chosen):
            states = captured_states(target, tokens, config.captured)
            known |= {id(each): row[: len(each.tokens)].clone() for each, row in zip(chosen, states, strict=True)}
        captured = pad_sequence([known[id(each)] for each in chosen], batch_first=True)
        losses = []
        with torch.autocast("cpu", torch.bfloat16):
            for k, hidden in enumerate(draft(tokens, captured, embedding, settings.unroll)):
                guessed, wanted = in_reply[:, k + 2 :], tokens[:, k + 2 :]
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


def _rows(dialogues: Sequence[Exchange]) -> tuple[Tensor, Tensor]:
    """Tokens [B, T], and which of them a draft has to guess: the reply's, except its first, bool [B, T]."""
    tokens = pad_right([d.tokens for d in dialogues])
    columns = torch.arange(tokens.shape[1])
    first = torch.tensor([d.prompt + 1 for d in dialogues]).unsqueeze(1)
    end = torch.tensor([len(d.tokens) for d in dialogues]).unsqueeze(1)
    return tokens, (columns >= first) & (columns < end)


def _batches(dialogues: Sequence[Exchange], settings: DraftTraining) -> Iterator[Sequence[Exchange]]:
    """Rows of a length together, because some are ten times as long as others; such batches in any order."""
    rng = random.Random(settings.seed)
    for _ in range(settings.epochs):
        drawn = sorted(rng.sample(dialogues, len(dialogues)), key=lambda each: len(each.tokens))
        begins = range(0, len(drawn) - settings.batch + 1, settings.batch)
        for begin in rng.sample(begins, len(begins)):
            yield drawn[begin : begin + settings.batch]

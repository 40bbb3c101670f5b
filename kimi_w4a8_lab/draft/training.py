"""Train an EAGLE3 draft on conversations and the served target's states in them, with the training-time test.

The states must be those of the target as served, because the draft meets these. A stopped run continues from its last
checkpoint and gives the same draft as an unbroken one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_w4a8_eagle3.base.errors import KimiError

from .acceptance import StatesOf
from .collected import Collected
from .eagle3 import Draft, pad_right
from .optim import optimizers, schedule, set_learning_rate

SAVED_EVERY = 50  # steps between two checkpoints
ShowStep = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of a draft's training. `unroll` draft steps are trained at once, as many as are served.

    keep: weight of the distance from the first draft's distribution, at the tokens that the first draft guesses.
    """

    seed: int = 30360
    epochs: int = 3
    batch: int = 12
    unroll: int = 3
    step_weight: float = 0.8  # step k counts step_weight ** k in the loss
    lr: float = 1.6e-2
    warmup: int = 20
    decay: float = 0.5
    keep: float = 0.0

    def steps(self, rows: int) -> int:
        """Optimizer steps of the whole run on so many rows."""
        return self.epochs * (rows // self.batch)


def train(
    draft: Draft,
    rows: Sequence[Collected],
    states_of: StatesOf,
    embedding: Tensor,
    settings: TrainingSettings,
    report: ShowStep = lambda step, values: None,
    checkpoint: Path | None = None,
) -> Draft:
    """Train `draft`, float32 and in place, for `epochs` passes over `rows`; return it in evaluation mode.

    Calls `report(step, {loss, first, last})` after each step: the loss, and the cross entropy of the first and the
    last draft step. Raises KimiError for a checkpoint of another run, and for a loss that is not finite.
    """
    torch.manual_seed(settings.seed)
    opts, total = optimizers(draft, settings.lr, weight_decay=0.0), settings.steps(len(rows))
    names = blake2b("".join(f"{row.name} {len(row.tokens)}\n" for row in rows).encode(), digest_size=8).hexdigest()
    job = {**asdict(settings), "rows": names, "sizes": str(draft.sizes)}
    first = deepcopy(draft).requires_grad_(False).eval() if settings.keep else None
    done = _restored(checkpoint, job, draft, opts)
    device = embedding.device
    draft.train()
    for step, chosen in enumerate(_batches(rows, settings)):
        if step < done:
            continue
        tokens = pad_right([row.tokens for row in chosen]).to(device)
        to_guess = pad_right([row.guessed for row in chosen]).bool().to(device)
        captured = states_of(chosen).to(device)
        losses = []
        with torch.autocast(device.type, torch.bfloat16):
            before = first(tokens, captured, embedding, settings.unroll) if first else []
            for k, hidden in enumerate(draft(tokens, captured, embedding, settings.unroll)):
                guessed = to_guess[:, k + 2 :]
                logits, wanted = draft.logits(hidden[guessed]).float(), draft.rows(tokens[:, k + 2 :][guessed])
                losses.append(F.cross_entropy(logits, wanted))
                if first:
                    losses[-1] += settings.keep * _distance(first.logits(before[k][guessed]).float(), logits, wanted)
        loss = torch.stack([settings.step_weight**k * value for k, value in enumerate(losses)]).sum()
        if not torch.isfinite(loss):
            remedy = "train again with half of the learning rate (--lr)"
            raise KimiError(f"the loss is {loss.item()} at step {step + 1}", "", "a finite loss", remedy)
        set_learning_rate(opts, schedule(step, total, settings.lr, settings.warmup, settings.decay))
        loss.backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
        if checkpoint and (step + 1) % SAVED_EVERY == 0:
            state = {"draft": draft.state_dict(), "opts": [opt.state_dict() for opt in opts]}
            torch.save({"job": job, "step": step + 1, **state}, temporary := checkpoint.with_suffix(".tmp"))
            temporary.replace(checkpoint)
        report(step + 1, {"loss": loss.item(), "first": losses[0].item(), "last": losses[-1].item()})
    return draft.eval()


def _distance(before: Tensor, logits: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean KL divergence from the first draft's distribution; 0 where that draft guesses wrongly."""
    known = (before.argmax(-1) == wanted)[:, None]
    old, new = (known * side.log_softmax(-1) for side in (before, logits))
    return F.kl_div(new, old, log_target=True, reduction="batchmean")


def _restored(path: Path | None, job: dict[str, object], draft: Draft, opts: Sequence[torch.optim.Optimizer]) -> int:
    """Load the checkpoint of the same run and return its step; 0 without one."""
    if path is None or not path.exists():
        return 0
    found = torch.load(path, map_location=draft.fc.weight.device, weights_only=True)
    if found["job"] != job:
        what, remedy = "this folder has the checkpoint of another training run", "name another folder with --to"
        raise KimiError(what, str(path), "the same settings and conversations", remedy)
    draft.load_state_dict(found["draft"])
    for opt, state in zip(opts, found["opts"], strict=True):
        opt.load_state_dict(state)
    return int(found["step"])


def _batches(rows: Sequence[Collected], settings: TrainingSettings) -> Iterator[Sequence[Collected]]:
    """Rows of a length together, because some are ten times as long as others; such batches in any order."""
    rng = random.Random(settings.seed)
    for _ in range(settings.epochs):
        drawn = sorted(rng.sample(rows, len(rows)), key=lambda row: len(row.tokens))
        begins = range(0, len(drawn) - settings.batch + 1, settings.batch)
        for begin in rng.sample(begins, len(begins)):
            yield drawn[begin : begin + settings.batch]

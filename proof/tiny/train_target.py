"""Train the target on fresh word problems; from the middle on mostly through the rounding to INT4 (QAT)."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from kimi_w4a8_eagle3.base.files import write_atomic
from kimi_w4a8_lab.draft.layers import initialise
from kimi_w4a8_lab.draft.optim import optimizers, schedule, set_learning_rate

from .config import TargetConfig
from .data import batches
from .mixed import TYPED_SHARE
from .model import MoE, TargetModel
from .tower import tower_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class TargetTraining:
    """Settings of the target's training; a step sees about 25 conversations."""

    seed: int = 20260
    steps: int = 5700
    tokens: int = 4096
    lengths: tuple[int, ...] = (512, 768, 1024, 1024, 2048)  # tokens of a row, drawn for each step
    lr: float = 5e-3
    warmup: int = 50
    decay: float = 0.35  # share of the run, at its end, in which the learning rate falls to zero
    weight_decay: float = 0.02
    int4_from: float = 0.625  # share of the run after which three steps in four see INT4 weights
    balance_rate: float = 2e-3  # step of the router bias towards even load
    drills: float = 0.25  # share of the rows that are bare operations
    given: float = 0.1  # weight of what is given at inference
    typed: float = TYPED_SHARE  # share of the conversations about what people type, in the rows of these lengths
    brief: float = 0.0  # share of the steps with short rows, nearly all of them about what people type
    save_every: int = 100


def train_target(
    tokenizer: Tokenizer,
    settings: TargetTraining,
    state_file: Path,
    report: Callable[[int, dict[str, float]], None] = lambda step, values: None,
    begin: TargetModel | None = None,
) -> tuple[TargetModel, float]:
    """Train, or continue from `state_file`: the model and the seconds it took, earlier parts of the run included.

    With `begin` the training starts from its weights, and the embeddings that a vision tower has learned to make stay
    as they are. Calls `report(step, {loss, ...})` after each step.
    """
    torch.manual_seed(settings.seed)
    model = TargetModel(TargetConfig())
    initialise(model, settings.seed)
    if begin is not None:
        model.load_state_dict(begin.state_dict())
        kept = torch.tensor(tower_tokens(tokenizer))
        model.embed_tokens.weight.register_hook(lambda gradient: gradient.index_fill(0, kept, 0.0))
    opts = optimizers(model, settings.lr, settings.weight_decay)
    first, seconds = _resume(model, opts, settings, state_file)
    data = batches(
        tokenizer, settings.tokens, settings.lengths, settings.seed, settings.drills, settings.given,
        typed=settings.typed, brief=settings.brief,
    )  # fmt: skip
    for _ in range(first):
        next(data)  # a continued run sees the data that an unbroken one would
    model.train()
    for step in range(first, settings.steps):
        began = time.monotonic()
        set_learning_rate(opts, schedule(step, settings.steps, settings.lr, settings.warmup, settings.decay))
        set_fake_int4(model, step >= settings.int4_from * settings.steps and step % 4 != 0)
        tokens, weights = next(data)
        with torch.autocast("cpu", torch.bfloat16):
            logits, _ = model(tokens[:, :-1])
        losses = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        loss = losses @ weights.flatten() / weights.sum()
        loss.backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
        for router in model.routers():
            router.balance(settings.balance_rate)
        seconds += time.monotonic() - began
        if (step + 1) % settings.save_every == 0 or step + 1 == settings.steps:
            _save(model, opts, settings, step + 1, seconds, state_file)
        answer_loss = losses.detach()[weights.flatten() == 1.0].mean()
        report(step + 1, {"loss": answer_loss.item(), "load": worst_load(model)})
    set_fake_int4(model, False)
    return model.eval(), seconds


def set_fake_int4(model: TargetModel, on: bool) -> None:
    """Switch the rounding of the routed experts' weights."""
    for layer in model.layers:
        if isinstance(layer.mlp, MoE):
            layer.mlp.experts.fake_int4 = on


def worst_load(model: TargetModel) -> float:
    """Load of the most used expert of any layer in the last step, as a multiple of the even share."""
    loads = [router.load for router in model.routers() if router.load is not None]
    return max(float(load.max() / load.mean()) for load in loads)


def _save(model: TargetModel, opts: list[Any], settings: TargetTraining, step: int, seconds: float, file: Path) -> None:
    state: dict[str, Any] = {"settings": asdict(settings), "step": step, "seconds": seconds}
    state["model"] = model.state_dict()
    state["opts"] = [opt.state_dict() for opt in opts]
    file.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    torch.save(state, content)
    write_atomic(file, content.getvalue())


def _resume(model: TargetModel, opts: list[Any], settings: TargetTraining, file: Path) -> tuple[int, float]:
    if not file.is_file():
        return 0, 0.0
    state = torch.load(file, weights_only=True)
    if state["settings"] != asdict(settings):
        return 0, 0.0  # made with other settings: begin anew
    model.load_state_dict(state["model"])
    for opt, saved in zip(opts, state["opts"], strict=True):
        opt.load_state_dict(saved)
    return int(state["step"]), float(state["seconds"])

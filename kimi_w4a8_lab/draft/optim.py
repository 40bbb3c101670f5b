"""The two optimizers of the training runs: Muon for weight matrices, AdamW for everything else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Muon(torch.optim.Optimizer):
    """Momentum whose matrix update is orthogonalised; stacked experts [E, N, K] are E matrices.

    The update has the root mean square of an AdamW step (0.2), so that one learning rate serves both optimizers.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Update every matrix once."""
        for group in self.param_groups:
            for weight in group["params"]:
                state: dict[str, Any] = self.state[weight]
                momentum = state.setdefault("momentum", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonalise(weight.grad.lerp(momentum, group["momentum"]))
                scale = 0.2 * max(weight.shape[-2:]) ** 0.5
                weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """The nearest (semi-)orthogonal matrix to [..., N, K], roughly: five quintic Newton-Schulz iterations."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = (matrix.mT if tall else matrix).bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrix.dtype)


def optimizers(model: nn.Module, lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices; AdamW for embedding, head, router and norms."""
    matrices: list[Tensor] = []
    rest: list[Tensor] = []
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        hidden = weight.ndim > 1 and not name.startswith(("embed_tokens", "lm_head")) and ".gate.weight" not in name
        (matrices if hidden else rest).append(weight)
    return [
        Muon(matrices, lr, weight_decay=weight_decay),
        torch.optim.AdamW(rest, lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def set_learning_rate(opts: Iterable[torch.optim.Optimizer], lr: float) -> None:
    """One learning rate for all groups."""
    for opt in opts:
        for group in opt.param_groups:
            group["lr"] = lr


def schedule(step: int, total: int, peak: float, warmup: int, decay: float) -> float:
    """Linear warm-up, flat, then linear decay to zero over the last `decay` share of the run."""
    down = (total - step) / max(1.0, decay * total)
    return peak * min(1.0, (step + 1) / warmup, down)

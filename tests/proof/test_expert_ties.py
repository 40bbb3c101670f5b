"""A tie rule can be wrong by more than a nat, because a step of rounding decides between two experts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_w4a8_lab.accuracy.prompts import prompts
from kimi_w4a8_laptop import tiny
from proof.tiny.checkpoint import load_target
from proof.tiny.model import RMSNorm, Router
from proof.tiny.tokenizer import load_tokenizer


@torch.no_grad()
def test_a_rounding_step_changes_an_expert_and_with_it_the_next_token_by_more_than_a_nat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of what each norm gives is one bfloat16 step larger: as other orders of summation make it, only more often.

    A long prompt of `eval lossless`. At every token: by how much the model preferred its next token to the one that it
    names after that step. With the experts' choices held as they were, the same step overturns little.
    """
    step = torch.Generator()
    routed, held, share = [], [], 0.0

    def norm(self: RMSNorm, x: Tensor) -> Tensor:
        out = F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return out + out * (torch.rand(out.shape, generator=step) < share) * 2**-8

    def route(self: Router, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        ids = (scores + self.e_score_correction_bias).topk(self.c.top_k).indices
        ids = held[len(routed)] if held else ids
        routed.append(ids)
        chosen = scores.gather(1, ids)
        return chosen / chosen.sum(-1, keepdim=True) * self.c.routed_scale, ids

    monkeypatch.setattr(RMSNorm, "forward", norm)
    monkeypatch.setattr(Router, "forward", route)
    model = load_target(tiny.target_path())
    text = [prompt.text for prompt in prompts(24) if prompt.kind == "long"][2]
    ids = torch.tensor([load_tokenizer(tiny.target_path()).encode(text).ids])

    def passed() -> tuple[Tensor, list[Tensor]]:
        routed.clear()
        step.manual_seed(0)
        return model(ids)[0][0].float(), [experts.sort().values for experts in routed]

    before, experts = passed()
    share = 0.5
    after, others = passed()
    held = experts
    with_held, _ = passed()
    preferred = before.amax(-1)
    overturned, little = (
        preferred - before.gather(1, logits.argmax(-1, keepdim=True)).squeeze(1) for logits in (after, with_held)
    )
    changed = torch.stack([(a != b).any(1) for a, b in zip(experts, others, strict=True)]).any(0)
    assert ids.shape[1] > 1000 and changed[overturned >= 1.0].all()
    assert overturned.max() > 1.0 > little.max()

"""Draft tokens that a server accepts: the walk of greedy EAGLE3 over the target's own replies, chain of `steps`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .config import DraftConfig
from .draft import Draft
from .generate import Exchange, pad_right
from .model import TargetModel
from .train_draft import captured_states

SERVED_STEPS = 3  # --speculative-num-steps 3, topk 1, 4 draft tokens


@dataclass(frozen=True)
class DraftAcceptance:
    """`length`: tokens a verification yields, 1..steps + 1; `by_position[k]`: share with more than k guesses right."""

    length: float
    by_position: list[float]


@torch.no_grad()
def acceptance(
    target: TargetModel, draft: Draft, dialogues: Sequence[Exchange], steps: int = SERVED_STEPS
) -> DraftAcceptance:
    """Walk every reply: each verification takes the leading right guesses and one token of the target's own."""
    embedding = target.embed_tokens.weight
    verifications = generated = 0
    accepted = [0] * steps
    for begin in range(0, len(dialogues), 100):
        part = dialogues[begin : begin + 100]
        tokens = pad_right([d.tokens for d in part])
        chain = draft(tokens, captured_states(target, tokens, DraftConfig().captured), embedding, steps)
        hits = [draft.logits(hidden).argmax(-1) == tokens[:, k + 2 :] for k, hidden in enumerate(chain)]
        for row, dialogue in enumerate(part):
            last = dialogue.prompt  # index of the newest token; the prompt's own forward yields the first one
            while last < len(dialogue.tokens) - 1:
                room = min(steps, len(dialogue.tokens) - 1 - last)
                right = 0
                while right < room and hits[right][row, last - 1]:
                    accepted[right] += 1
                    right += 1
                taken = min(right + 1, len(dialogue.tokens) - 1 - last)
                last, generated, verifications = last + taken, generated + taken, verifications + 1
    return DraftAcceptance(generated / verifications, [count / verifications for count in accepted])

"""Check at start-up that a speculating server accepts drafts at all.

An accept length of exactly 1.0 costs speed and raises no error. Its causes are a wrong `--speculative-algorithm` (EAGLE
for EAGLE3), a draft of another target, or the wrong captured layers.
"""

from __future__ import annotations

from ..base.errors import KimiError
from .client import EngineClient
from .metrics import Acceptance, acceptance_from_histograms

# Everyday prompts with predictable continuations: any draft trained for its target accepts some tokens on them.
PROMPTS = (
    "Write the numbers from one to ten, separated by commas.",
    "Tom has 3 apples. He buys 4 more apples. How many apples does Tom have now?",
    "Mia has 12 pens and gives 5 pens to Leo. How many pens does Mia have left?",
    "Repeat this sentence three times: The train leaves at noon.",
)
_MAX_TOKENS = 48
FLOOR = 1.0  # accept length at which drafts only cost time


def measure(client: EngineClient, num_draft_tokens: int) -> Acceptance | None:
    """Measure acceptance over a few greedy requests, from their verify-step histograms; None without speculation."""
    answers = client.chat_all(PROMPTS, _MAX_TOKENS, concurrency=len(PROMPTS))
    return acceptance_from_histograms((answer.accepted_histogram for answer in answers), num_draft_tokens)


def require_acceptance(client: EngineClient, num_draft_tokens: int, draft: str) -> Acceptance:
    """Run `measure`; raise KimiError when the server does not speculate or never accepted a draft token."""
    acceptance = measure(client, num_draft_tokens)
    if acceptance is None:
        raise KimiError(
            "the server does not speculate although a draft was configured",
            where=client.base_url,
            expected="verify steps in the answers' statistics",
            remedy="look for the speculative worker in the server's log",
        )
    if acceptance.length <= FLOOR:
        raise KimiError(
            f"accept length {acceptance.length:.2f}: not one draft token was accepted "
            f"in {acceptance.steps} verify steps",
            where=f"draft {draft}",
            expected=f"more than {FLOOR:.1f} (published drafts of Kimi-K2.5 reach 2.3 to 3.8)",
            remedy="check that --speculative-algorithm is EAGLE3, that the draft was trained for this target, and "
            "that eagle_aux_hidden_state_layer_ids are the layers it was trained on",
        )
    return acceptance

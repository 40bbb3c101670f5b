"""Check a server by its answers to canary prompts at its start, and compare later answers with those.

An accept length of exactly 1.0 costs speed and raises no error. Its causes are a wrong `--speculative-algorithm` (EAGLE
for EAGLE3), a draft of another target, or the wrong captured layers. A broken tensor raises no error either: its logits
are NaN, and the answers are empty.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

from ..base.errors import KimiError
from .client import EngineClient, Generation, Refused
from .metrics import NAN_LOGITS, Acceptance, acceptance_from_histograms

# Everyday prompts with predictable continuations: any draft trained for its target accepts some tokens on them.
PROMPTS = (
    "Write the numbers from one to ten, separated by commas.",
    "Tom has 3 apples. He buys 4 more apples. How many apples does Tom have now?",
    "Mia has 12 pens and gives 5 pens to Leo. How many pens does Mia have left?",
    "Repeat this sentence three times: The train leaves at noon.",
)
# A request of each kind that goes its own way through sampling and verification.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "seeded": {"temperature": 1.0, "top_p": 0.95, "seed": 7},  # the draw has another kernel for filters
    "penalised": {"frequency_penalty": 0.5, "repetition_penalty": 1.1, "min_tokens": 4},
    "grammar": {
        "temperature": 1.0,
        "chat_template_kwargs": {"thinking": False},  # a grammar begins after the thinking
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
    },
}
_KIND_TOKENS = 8  # the first of a prefill, the others of verify or decode steps
_TRIES = 3  # a client's bad request ends the requests in its batch, so one failure proves nothing
_MAX_TOKENS = 48
_OPENING = 4  # tokens that are compared; later ones may differ, because a GPU rounds differently in another batch
_BAND = 0.05  # nats
FLOOR = 1.0  # accept length at which drafts only cost time

Openings = tuple[tuple[int | str, ...], ...]


class KindFails(KimiError):
    """Every request of one kind failed inside the engine."""


def require_kinds(client: EngineClient, groups: int) -> None:
    """Raise KindFails when the engine answers a kind of request with HTTP 500, in any group of ranks.

    A kind that the server refuses for another reason is not served, or the server is full.
    """
    for kind, fields in KINDS.items():
        for tries_left in reversed(range(_TRIES)):
            try:
                client.chat_all([PROMPTS[0]] * groups, _KIND_TOKENS, groups, **fields)
            except Refused as refused:
                if refused.status == HTTPStatus.INTERNAL_SERVER_ERROR and tries_left:
                    continue
                if refused.status == HTTPStatus.INTERNAL_SERVER_ERROR:
                    raise KindFails(
                        f"every {kind} request fails inside the engine: {refused.message}",
                        where=client.base_url,
                        expected="an answer to each kind of request",
                        remedy="read the error in the engine's log",
                    ) from refused
            break


def ask(client: EngineClient, groups: int) -> list[Generation]:
    """Return the greedy answers to the prompts, repeated so that each of the engine's groups of ranks gets one."""
    prompts = [PROMPTS[at % len(PROMPTS)] for at in range(max(groups, len(PROMPTS)))]
    return client.chat_all(prompts, _MAX_TOKENS, concurrency=len(prompts))


def openings(answers: Sequence[Generation]) -> Openings:
    """Return the first tokens of each answer, or its first words where the server sends no token ids."""
    return tuple(
        answer.token_ids[:_OPENING] if answer.token_ids else tuple(answer.text.split()[:_OPENING]) for answer in answers
    )


def fault_of(answers: Sequence[Generation], recorded: Openings | None) -> str | None:
    """Return what is wrong with the answers, or None. recorded: openings of the same server or checkpoint."""
    found = openings(answers)
    if all(not opening or (len(opening) == _OPENING and len(set(opening)) == 1) for opening in found):
        return "the answers to the canary prompts are empty or repeat one token"
    if recorded is not None and 2 * sum(map(tuple.__eq__, found, recorded)) < len(recorded):
        return "the answers to the canary prompts do not begin like the recorded ones"
    return None


def recorded(client: EngineClient, answers: Sequence[Generation]) -> dict[str, Any]:
    """Return what later servers of the same checkpoint must answer, and the log probabilities of these tokens."""
    asked = answers[: len(PROMPTS)]
    prompts, tokens = [answer.prompt_ids for answer in asked], [answer.token_ids for answer in asked]
    return {"band": _BAND, "prompts": prompts, "answers": tokens, "logprobs": _logprobs(client, prompts, tokens)}


def _logprobs(client: EngineClient, prompts: Sequence[Any], answers: Sequence[Any]) -> list[list[float]]:
    scores = client.score([[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)])
    return [score[-len(answer) :] for score, answer in zip(scores, answers, strict=True)]


def require_recorded(client: EngineClient, answers: Sequence[Generation], file: Path) -> None:
    """Raise KimiError where a server does not answer as the file of `recorded` says.

    Another batch or number of GPUs changes the log probability of a token by rounding, but the mean by less than the
    file's band.
    """
    known = json.loads(file.read_text())
    why = fault_of(answers[: len(PROMPTS)], tuple(tuple(tokens[:_OPENING]) for tokens in known["answers"]))
    found = _logprobs(client, known["prompts"], known["answers"])
    apart = [abs(a - b) for one, other in zip(found, known["logprobs"], strict=True) for a, b in zip(one, other)]  # noqa: B905
    if [list(answer.prompt_ids) for answer in answers[: len(PROMPTS)]] != known["prompts"]:
        why = "its tokenizer or chat template gives other tokens"
    elif not (mean := sum(apart) / len(apart)) <= known["band"]:
        why = f"log probabilities of known answers differ by {mean:.3g} on average, more than {known['band']:g}"
    if why is not None:
        raise KimiError(
            f"the model does not answer as this checkpoint did: {why}",
            where=f"{client.base_url}, compared with {file}",
            expected="the recorded answers of the checkpoint that the recipe names",
            remedy="check the files with `kimi-w4a8 fetch --verify`, then the kernels with `kimi-w4a8 accept`",
        )


def acceptance_of(answers: Sequence[Generation], num_draft_tokens: int) -> Acceptance | None:
    """Return the acceptance over the answers, from their verify-step histograms; None without speculation."""
    return acceptance_from_histograms((answer.accepted_histogram for answer in answers), num_draft_tokens)


def acceptance_fault(answers: Sequence[Generation], num_draft_tokens: int, groups: int, least: float) -> str | None:
    """Return what is wrong with the acceptance, or None.

    least: accept length over all answers that is too low. One group that accepts nothing hardly lowers that, so with
    several groups every single answer counts.
    """
    found = acceptance_of(answers, num_draft_tokens)
    if found is not None and found.length <= least:
        nothing = "not one draft token was accepted" if found.length <= FLOOR else f"it must be above {least:g}"
        return f"accept length {found.length:.2f}: {nothing} in {found.steps} verify steps of the canary prompts"
    alone = [acceptance_of([answer], num_draft_tokens) for answer in answers] if groups > 1 else []
    if any(one is not None and one.length <= FLOOR for one in alone):
        return "an answer to the canary prompts accepted no draft token: one group of ranks may have a broken draft"
    return None


def require_answers(client: EngineClient, groups: int) -> list[Generation]:
    """Ask all kinds and the prompts; raise KimiError for failures, NaN logits and answers without content."""
    require_kinds(client, groups)
    answers = ask(client, groups)
    nan = 0.0
    with suppress(KimiError):  # a server without metrics
        nan = client.metrics().total(NAN_LOGITS) or 0.0
    why = f"{nan:.0f} rows of logits were NaN" if nan else fault_of(answers, None)
    if why is not None:
        raise KimiError(
            f"the model computes nonsense: {why}",
            where=client.base_url,
            expected="finite logits and answers with content",
            remedy="check the files with `kimi-w4a8 fetch --verify`, then the kernels with `kimi-w4a8 accept`",
        )
    return answers


def require_acceptance(
    answers: Sequence[Generation], num_draft_tokens: int, draft: str, groups: int = 1, least: float = FLOOR
) -> Acceptance:
    """Return the acceptance; raise KimiError when the server does not speculate or accepts too few draft tokens."""
    acceptance = acceptance_of(answers, num_draft_tokens)
    if acceptance is None:
        raise KimiError(
            "the server does not speculate although a draft was configured",
            where=f"draft {draft}",
            expected="verify steps in the answers' statistics",
            remedy="look for the speculative worker in the server's log",
        )
    why = acceptance_fault(answers, num_draft_tokens, groups, least)
    if why is not None:
        raise KimiError(
            why,
            where=f"draft {draft}",
            expected=f"more than {least:.1f} (published drafts of Kimi-K2.5 reach 2.3 to 3.8)",
            remedy="check that --speculative-algorithm is EAGLE3, that the draft was trained for this target, and "
            "that eagle_aux_hidden_state_layer_ids are the layers it was trained on",
        )
    return acceptance

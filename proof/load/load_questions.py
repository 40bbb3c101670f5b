"""Questions whose greedy answer is known beforehand, so that every answer under load can be compared with it.

Greedy answers repeat only where the model prefers its token clearly: tokens that are batched with other requests round
differently, and at a near tie the other token may win. Questions with a near tie anywhere in
their answer are left out, so a text that differs later is a fault and needs no excuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import httpx

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.engine.client import bearer
from kimi_w4a8_lab.accuracy.problems import problems

# Rounding moved the gap between two tokens by up to 0.44 nats; this is far beyond.
CLEAR_GAP = 2.0
# Answers cut early, answers that end by themselves, and prompts with an earlier turn: (max_tokens, earlier turns).
_SHAPES = ((192, 0), (12, 0), (192, 1), (32, 0))
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class ExpectedAnswer:
    """Expected answer: the text, its number of tokens, and its finish reason."""

    text: str
    tokens: int
    finish_reason: str


@dataclass(frozen=True)
class Question:
    """A greedy chat request. answer: None where only the number of tokens is known (`ignore_eos`, `max_tokens`)."""

    model: str
    messages: tuple[tuple[str, str], ...]  # role, content
    max_tokens: int
    answer: ExpectedAnswer | None = None
    ignore_eos: bool = False

    def body(self, stream: bool) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": role, "content": content} for role, content in self.messages],
            "max_tokens": self.max_tokens,
            "temperature": 0.0,
            "ignore_eos": self.ignore_eos,
            "separate_reasoning": False,  # thinking and answer as one text, which is compared
        }
        return body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})


def known_questions(base_url: str, count: int = 24, api_key: str | None = None, seed: int = 7) -> list[Question]:
    """`count` questions with the answers that the server at `base_url` gives now, one request at a time.

    Raises KimiError when the server does not answer, or when too many of its answers have near ties.
    """
    found: list[Question] = []
    with httpx.Client(base_url=base_url, timeout=_TIMEOUT_S, headers=bearer(api_key)) as http:
        try:
            model = served_model(http)
            for question in _candidates(model, 2 * count, seed):
                answer = _clear_answer(http, question)
                if answer is not None:
                    found.append(Question(model, question.messages, question.max_tokens, answer))
                if len(found) == count:
                    return found
        except httpx.HTTPError as error:
            raise KimiError(f"the server does not answer: {error or type(error).__name__}", where=base_url) from error
    raise KimiError(
        f"only {len(found)} of {2 * count} questions have answers without near ties",
        where=base_url,
        expected=f"{count} answers whose every token is preferred by {CLEAR_GAP} nats",
        remedy="this load is made for the built-in model (--recipe tiny)",
    )


def endless_question(model: str, max_tokens: int) -> Question:
    """A request that runs for exactly `max_tokens` tokens; its text is not known beforehand."""
    return Question(model, (("user", problems(1)[0].question),), max_tokens, ignore_eos=True)


def served_model(http: httpx.Client) -> str:
    """The name of the first model that a server lists."""
    answer = http.get("/v1/models")
    answer.raise_for_status()
    return str(answer.json()["data"][0]["id"])


def _candidates(model: str, count: int, seed: int) -> Iterator[Question]:
    """Held-out problems in all shapes, in turn."""
    drawn = iter(problems(2 * count, seed=seed))
    for number in range(count):
        max_tokens, earlier = _SHAPES[number % len(_SHAPES)]
        messages: list[tuple[str, str]] = []
        for problem in islice(drawn, earlier):
            messages += [("user", problem.question), ("assistant", problem.solution)]
        yield Question(model, (*messages, ("user", next(drawn).question)), max_tokens)


def _clear_answer(http: httpx.Client, question: Question) -> ExpectedAnswer | None:
    """The server's answer; None when some token of it was nearly another one."""
    response = http.post("/v1/chat/completions", json=question.body(False) | {"logprobs": True, "top_logprobs": 2})
    response.raise_for_status()
    body = response.json()
    choice = body["choices"][0]
    if min(gap(place) for place in choice["logprobs"]["content"]) < CLEAR_GAP:
        return None
    return ExpectedAnswer(choice["message"]["content"], body["usage"]["completion_tokens"], choice["finish_reason"])


def gap(place: dict[str, Any]) -> float:
    """By how many nats the chosen token was preferred to the best other one."""
    others = [other["logprob"] for other in place["top_logprobs"] if other["token"] != place["token"]]
    return float(place["logprob"] - max(others)) if others else 0.0

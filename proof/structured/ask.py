"""Asks a server, and compares two servers' answers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_lab.accuracy.greedy_match import first_difference

from .cases import StructuredAnswer, StructuredCase, fault, schema_body, tool_body
from .schemas import HUGE, IMPOSSIBLE, NOT_HELD

# SGLang gives a grammar up after at least 10 s (docs/request-limits.md); the rest is for a busy machine.
ANSWER_WITHIN_S = 60.0
# Rounding moved the gap between two tokens by up to 0.44 nats (docs/perf/answers.md). A grammar leaves tokens that the
# model finds equally bad, so that ties are common here.
TIE_GAP = 0.5
_CONTROL = "Tom has 3 apples and buys 4 more. How many apples?"


@dataclass(frozen=True)
class StructuredVerdict:
    """Verdict on a case. kind: `same` tokens as without drafts, or a numerical `tie` first, or `other`."""

    case: StructuredCase
    answer: StructuredAnswer
    kind: str
    fault: str | None

    def json(self) -> dict[str, Any]:
        """Everything, but the candidates."""
        found = asdict(self)
        del found["answer"]["top"]
        return found


class Asker:
    """A client of one server, for any number of threads."""

    def __init__(self, base_url: str) -> None:
        self._http = httpx.Client(base_url=base_url, timeout=300.0, limits=httpx.Limits(max_connections=64))
        try:
            self.model = str(self._http.get("/v1/models").raise_for_status().json()["data"][0]["id"])
        except (httpx.HTTPError, LookupError, ValueError) as error:
            raise KimiError(f"the server does not say which model it serves: {error}", where=base_url) from error

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def all(self, asked: Sequence[StructuredCase], concurrency: int) -> list[StructuredAnswer]:
        """The answers to all cases, in their order."""
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda case: self.ask(case.body), asked))

    def ask(self, body: dict[str, Any]) -> StructuredAnswer:
        """The answer to one body; a server that does not answer is status 0."""
        try:
            response = self._http.post("/v1/chat/completions", json=body)
        except httpx.HTTPError as error:
            return StructuredAnswer(0, str(error) or type(error).__name__)
        if response.status_code != 200:
            return StructuredAnswer(response.status_code, response.text)
        choice = response.json()["choices"][0]
        places = (choice.get("logprobs") or {}).get("content") or []
        top = tuple(
            {candidate["token"]: candidate["logprob"] for candidate in (*place["top_logprobs"], place)}
            for place in places
        )
        ids = tuple(choice.get("response_token_ids") or ())
        texts = tuple(place["token"] for place in places)
        return StructuredAnswer(200, "", choice["message"], choice["finish_reason"], ids, texts, top)


def compare(
    asked: Sequence[StructuredCase], expected: Sequence[StructuredAnswer], found: Sequence[StructuredAnswer]
) -> list[StructuredVerdict]:
    """Compare the answers without drafts (`expected`) and with them (`found`)."""
    return [_verdict(*answered) for answered in zip(asked, expected, found, strict=True)]


def refusals(asker: Asker) -> Iterator[str]:
    """Faults of the server with schemas that are huge, or that no answer can follow or be held to."""
    control = {"model": asker.model, "messages": [{"role": "user", "content": _CONTROL}], "max_tokens": 8}
    before = asker.ask({**control, "temperature": 0}).message
    for name, schema in {**IMPOSSIBLE, **HUGE, **NOT_HELD}.items():
        arguments = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
        bodies = {
            "response_format": schema_body(asker.model, _CONTROL, schema),
            "tools": tool_body(asker.model, _CONTROL, arguments),
        }
        if schema == {"$ref": "#"}:
            del bodies["tools"]  # there it is the arguments, without an end: cut by max_tokens
        for form, body in bodies.items():
            began = time.monotonic()
            answer = asker.ask({**body, "max_tokens": 8})
            took = time.monotonic() - began
            if not 400 <= answer.status < 500:
                yield f"{form}, {name}: HTTP {answer.status}, not refused: {answer.text[:200]} {answer.message}"
            elif took > ANSWER_WITHIN_S:
                yield f"{form}, {name}: refused after {took:.0f} s"
    if asker.ask({**control, "temperature": 0}).message != before:
        yield "another client's answer changed"


def _verdict(case: StructuredCase, expected: StructuredAnswer, found: StructuredAnswer) -> StructuredVerdict:
    wrong = fault(case, found) or fault(case, expected)
    place = first_difference(expected.ids, found.ids)
    if place is None:
        if not wrong and _content(expected) != _content(found):
            wrong = f"the same tokens, read differently: {_content(expected)} and {_content(found)}"
        return StructuredVerdict(case, found, "same", wrong)
    gap = _gap(expected, found, place)
    if gap is not None and gap < TIE_GAP:
        return StructuredVerdict(case, found, "tie", wrong)
    differs = f"token {place} is {found.texts[place : place + 1]} instead of {expected.texts[place : place + 1]}"
    return StructuredVerdict(case, found, "other", wrong or f"{differs}, gap {gap}")


def _gap(expected: StructuredAnswer, found: StructuredAnswer, place: int) -> float | None:
    """By how many nats the server without drafts preferred its own token; None when it did not consider the other."""
    if place >= min(len(expected.top), len(found.texts)):
        return None
    candidates = expected.top[place]
    other = candidates.get(found.texts[place])
    return None if other is None else candidates[expected.texts[place]] - other


def _content(answer: StructuredAnswer) -> tuple[Any, ...]:
    """The parts of an answer that its tokens decide. Ids of calls are drawn at random."""
    calls = [call["function"] for call in answer.message.get("tool_calls") or ()]
    return answer.message.get("content"), answer.message.get("reasoning_content"), calls, answer.finish_reason

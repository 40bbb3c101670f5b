"""Asks a server, and compares two servers' answers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from kimi_w4a8_eagle3.engine.client import EngineClient
from kimi_w4a8_lab.accuracy.comparison import first_difference

from .cases import StructuredAnswer, StructuredCase, fault, schema_body, tool_body
from .schemas import HUGE, IMPOSSIBLE, NOT_HELD

# SGLang gives a grammar up after at least 10 s (docs/request-limits.md); the rest is for a busy machine.
ANSWER_WITHIN_S = 60.0
_CONTROL = "Tom has 3 apples and buys 4 more. How many apples?"


@dataclass(frozen=True)
class StructuredVerdict:
    """Verdict on a case and on its answer with drafts."""

    case: StructuredCase
    answer: StructuredAnswer
    fault: str | None


class Asker:
    """A client of one server, for any number of threads."""

    def __init__(self, base_url: str) -> None:
        with EngineClient(base_url) as client:
            self.model = client.model_name()
        self._http = httpx.Client(base_url=base_url, timeout=300.0, limits=httpx.Limits(max_connections=64))

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
        ids = tuple(choice.get("response_token_ids") or ())
        return StructuredAnswer(200, "", choice["message"], choice["finish_reason"], ids)


def compare(
    asked: Sequence[StructuredCase], expected: Sequence[StructuredAnswer], found: Sequence[StructuredAnswer]
) -> list[StructuredVerdict]:
    """Compare the answers without drafts (`expected`) and with them (`found`)."""
    return [_verdict(*answered) for answered in zip(asked, expected, found, strict=True)]


def refusals(asker: Asker) -> Iterator[str]:
    """Faults of the server with schemas that no answer can follow or be held to, and with huge ones.

    A huge one may be answered, but not late.
    """
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
            if not 400 <= answer.status < 500 and not (answer.status == 200 and name in HUGE):
                yield f"{form}, {name}: HTTP {answer.status}, not refused: {answer.text[:200]} {answer.message}"
            elif took > ANSWER_WITHIN_S:
                yield f"{form}, {name}: HTTP {answer.status} after {took:.0f} s"
    if asker.ask({**control, "temperature": 0}).message != before:
        yield "another client's answer changed"


def _verdict(case: StructuredCase, expected: StructuredAnswer, found: StructuredAnswer) -> StructuredVerdict:
    """Judge both answers. On a CPU the tokens are the same bit for bit, so there is no rule for near ties."""
    wrong = fault(case, found) or fault(case, expected)
    place = first_difference(expected.ids, found.ids)
    if place is not None:
        wrong = wrong or f"token {place} is {found.ids[place : place + 1]}, not {expected.ids[place : place + 1]}"
    elif _content(expected) != _content(found):
        wrong = wrong or f"the same tokens, read differently: {_content(expected)} and {_content(found)}"
    return StructuredVerdict(case, found, wrong)


def _content(answer: StructuredAnswer) -> tuple[Any, ...]:
    """The parts of an answer that its tokens decide. Ids of calls are drawn at random."""
    calls = [call["function"] for call in answer.message.get("tool_calls") or ()]
    return answer.message.get("content"), answer.message.get("reasoning_content"), calls, answer.finish_reason

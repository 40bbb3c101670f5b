"""Asks a server for answers of schemas, and compares two servers' answers."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx

from kimi_w4a8_lab.accuracy.comparison import first_difference

from .structured_cases import StructuredAnswer, StructuredCase, fault


def asked(base_url: str, cases: Sequence[StructuredCase], concurrency: int = 8) -> list[StructuredAnswer]:
    """Return a server's answers to all cases, in their order; one that does not come has status 0."""
    limits = httpx.Limits(max_connections=concurrency)
    with httpx.Client(base_url=base_url, timeout=300.0, limits=limits) as http, ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(partial(_answer, http), (case.body for case in cases)))


def _answer(http: httpx.Client, body: dict[str, Any]) -> StructuredAnswer:
    try:
        response = http.post("/v1/chat/completions", json=body)
    except httpx.HTTPError as error:
        return StructuredAnswer(0, str(error) or type(error).__name__)
    if response.status_code != 200:
        return StructuredAnswer(response.status_code, response.text)
    choice = response.json()["choices"][0]
    ids = tuple(choice.get("response_token_ids") or ())
    return StructuredAnswer(200, "", choice["message"], choice["finish_reason"], ids)


def difference(case: StructuredCase, expected: StructuredAnswer, found: StructuredAnswer) -> str | None:
    """Return the fault of an answer without drafts (`expected`) and with them (`found`), or of the pair.

    On a CPU the tokens are the same bit for bit, so there is no rule for near ties.
    """
    if wrong := fault(case, found) or fault(case, expected):
        return wrong
    place = first_difference(expected.ids, found.ids)
    if place is not None:
        return f"token {place} is {found.ids[place : place + 1]}, not {expected.ids[place : place + 1]}"
    if _content(expected) != _content(found):
        return f"the same tokens, read differently: {_content(expected)} and {_content(found)}"
    return None


def _content(answer: StructuredAnswer) -> tuple[Any, ...]:
    """Return the parts of an answer that its tokens decide. Ids of calls are drawn at random."""
    calls = [call["function"] for call in answer.message.get("tool_calls") or ()]
    return answer.message.get("content"), answer.message.get("reasoning_content"), calls, answer.finish_reason

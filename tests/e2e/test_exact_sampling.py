"""A request has the same tokens with and without EAGLE3: sampled, seeded, penalized, whatever else is in its batch."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from kimi_w4a8_eagle3 import tiny

pytestmark = pytest.mark.server

QUESTIONS = [problem.question for problem in tiny.problems("held_out", 2, seed=11)]
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0, "seed": 1},
    "hot": {"temperature": 2.0, "seed": 2},
    "top-p": {"temperature": 1.0, "top_p": 0.95, "seed": 3},
    "top-k and min-p": {"temperature": 1.2, "top_k": 20, "min_p": 0.05, "seed": 4},
    "negative seed": {"temperature": 1.5, "seed": -(2**40)},
    "min_tokens": {"temperature": 0, "min_tokens": 40},
    "frequency": {"temperature": 0, "frequency_penalty": 2.0},
    "presence": {"temperature": 0, "presence_penalty": 1.5},
    "repetition": {"temperature": 0, "repetition_penalty": 1.3},
    "all penalties": {
        "temperature": 1.0,
        "seed": 5,
        "frequency_penalty": 0.7,
        "presence_penalty": -0.3,
        "repetition_penalty": 1.1,
        "min_tokens": 30,
    },
    "bias": {"temperature": 1.5, "seed": 6, "logit_bias": {"100": 3.0, "200": -5.0}},
    "stop string": {"temperature": 1.5, "seed": 7, "stop": ["th"], "frequency_penalty": 0.5},
    "choices": {"temperature": 1.8, "seed": 8, "n": 3, "presence_penalty": 0.5},
    "schema": {
        "temperature": 1.5,
        "seed": 9,
        "frequency_penalty": 0.4,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "sum", "schema": {"type": "object", "properties": {"sum": {"type": "integer"}}}},
        },
    },
}
BODIES = [
    {"messages": [{"role": "user", "content": question}], **params}
    for params in REQUESTS.values()
    for question in QUESTIONS
]


def answers(base_url: str, bodies: Sequence[dict[str, Any]], concurrency: int) -> list[list[tuple[Any, ...]]]:
    """Text, calls, end and tokens of every choice of every answer."""

    def answer(body: dict[str, Any]) -> list[tuple[Any, ...]]:
        asked = {"model": "kimi-k2.5-tiny", "max_tokens": 48, "logprobs": True, **body}
        reply = client.post("/v1/chat/completions", json=asked)
        assert reply.status_code == 200, reply.text
        return [
            (message.get("reasoning_content"), message["content"], choice["finish_reason"], tokens(choice))
            for choice in reply.json()["choices"]
            for message in [choice["message"]]
        ]

    with httpx.Client(base_url=base_url, timeout=200) as client, ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(answer, bodies))


def tokens(choice: dict[str, Any]) -> tuple[str, ...]:
    return tuple(place["token"] for place in choice["logprobs"]["content"])


@pytest.fixture(scope="module")
def expected(plain) -> list[list[tuple[Any, ...]]]:
    return answers(plain.base_url, BODIES, 6)


@pytest.mark.parametrize("concurrency", [2, 24])
def test_eagle3_changes_no_token_of_any_request(eagle3, expected, concurrency):
    kinds = [kind for kind in REQUESTS for _ in QUESTIONS]
    found = answers(eagle3.base_url, BODIES, concurrency)
    different = {kind for kind, want, got in zip(kinds, expected, found, strict=True) if want != got}
    assert not different


def test_what_the_requests_ask_for_happens(expected):
    by_kind = {kind: expected[len(QUESTIONS) * i :][: len(QUESTIONS)] for i, kind in enumerate(REQUESTS)}
    assert by_kind["greedy"] != by_kind["hot"] and by_kind["greedy"] != by_kind["frequency"]
    assert all(len(choice[3]) >= 40 for answer in by_kind["min_tokens"] for choice in answer)
    assert any(len({choice[3] for choice in answer}) > 1 for answer in by_kind["choices"])
    assert all(len(answer) == 3 for answer in by_kind["choices"])


def test_choices_are_the_answers_to_the_seeds_that_follow(eagle3):
    body = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "temperature": 1.8}
    [choices] = answers(eagle3.base_url, [body | {"seed": 70, "n": 3}], 1)
    alone = answers(eagle3.base_url, [body | {"seed": 70 + i} for i in range(3)], 3)
    assert choices == [answer[0] for answer in alone]


def test_without_a_seed_every_answer_is_drawn_anew(eagle3):
    body = {"messages": [{"role": "user", "content": QUESTIONS[1]}], "temperature": 2.0}
    assert len({answer[0][3] for answer in answers(eagle3.base_url, [body] * 6, 6)}) > 1
    seeded = [body | {"seed": 5}] * 3
    assert len({answer[0][3] for answer in answers(eagle3.base_url, seeded, 3)}) == 1


@pytest.mark.parametrize("seed", ["x", 1.5, 2**70])
def test_a_seed_that_is_no_integer_is_refused_by_both(eagle3, plain, seed):
    body = {"model": "kimi-k2.5-tiny", "messages": [{"role": "user", "content": "7"}], "seed": seed}
    for server in (eagle3, plain):
        reply = httpx.post(f"{server.base_url}/v1/chat/completions", json=body)
        assert reply.status_code == 400 and "seed: Input should be a valid integer" in reply.text

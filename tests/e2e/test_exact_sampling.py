"""A request has the same tokens with and without EAGLE3: sampled, seeded, penalized, whatever else is in its batch."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support.sampled import BODIES, QUESTIONS, REQUESTS, answers

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def expected(plain) -> list[list[tuple[Any, ...]]]:
    return answers(plain.base_url, BODIES, 6)


@pytest.mark.parametrize("concurrency", [4, 24])
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

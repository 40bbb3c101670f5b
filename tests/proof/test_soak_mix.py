"""Requests of a soak: everything from one seed, long and short, and a body that is too large."""

from __future__ import annotations

import time

import pytest
from support.loopback import answering
from support.scripted_server import scripted_server, whole

from proof.load.load_request import ClientOutcome, Manner
from proof.soak import questions

TOP = [{"token": "7", "logprob": -0.1}, {"token": "8", "logprob": -9.0}]
ANSWER = {
    "choices": [
        {
            "message": {"content": "7"},
            "finish_reason": "stop",
            "logprobs": {"content": [{"token": "7", "logprob": -0.1, "top_logprobs": TOP}]},
        }
    ],
    "usage": {"completion_tokens": 1},
}


def test_a_seed_gives_the_same_questions_in_the_same_order_and_another_seed_others() -> None:
    with scripted_server(lambda _, content: whole(ANSWER if content else {"data": [{"id": "m"}]})) as server:
        first, again, other = (questions.questions(server.base_url, seed, known=8) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert questions.leave_after(1)() == questions.leave_after(1)()


def test_questions_are_short_and_long_and_each_can_be_checked() -> None:
    with scripted_server(lambda _, content: whole(ANSWER if content else {"data": [{"id": "m"}]})) as server:
        found = questions.questions(server.base_url, seed=3, known=8)
    assert all((q.answer is not None) != (q.counted and q.ignore_eos) for q in found)
    lengths = [sum(len(text) for _, text in q.messages) for q in found]
    assert min(lengths) < 200 and max(lengths) > 5000
    assert min(q.max_tokens for q in found) == 8 and max(q.max_tokens for q in found) == 400


@pytest.mark.parametrize(
    ("status", "outcome"), [(413, ClientOutcome.REFUSED), (200, ClientOutcome.WRONG), (500, ClientOutcome.WRONG)]
)
def test_a_body_that_is_too_large_must_be_refused_as_that(monkeypatch, status: int, outcome: ClientOutcome) -> None:
    monkeypatch.setattr(questions, "_OVERSIZED_EVERY_S", 0.01)
    with answering(lambda *_: (status, b"")) as url, questions.Oversized(url) as client:
        while not client.records:
            time.sleep(0.01)
    record = client.records[0]
    assert (record.manner, record.status, record.outcome) == (Manner.BAD, status, outcome)

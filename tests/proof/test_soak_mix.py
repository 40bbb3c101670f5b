"""Requests of a soak: everything from one seed, long and short."""

from __future__ import annotations

from support.scripted_server import scripted_server, whole

from proof.soak.soak import questions

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
        first, again, other = (questions(server.base_url, seed, known=8) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_questions_are_short_and_long_and_each_can_be_checked() -> None:
    with scripted_server(lambda _, content: whole(ANSWER if content else {"data": [{"id": "m"}]})) as server:
        found = questions(server.base_url, seed=3, known=8)
    assert all((q.answer is not None) != (q.counted and q.ignore_eos) for q in found)
    lengths = [sum(len(text) for _, text in q.messages) for q in found]
    assert min(lengths) < 200 and max(lengths) > 5000
    assert min(q.max_tokens for q in found) == 8 and max(q.max_tokens for q in found) == 400

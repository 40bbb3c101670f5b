"""The verifying load client against servers that cut, repeat, change, refuse and hang: each is told apart."""

import asyncio
import json

import pytest
from support.scripted_server import Script, scripted_server, streamed, whole
from support.waiting import until

from proof.load.load import ClientLoad, forbidden
from proof.load.load_questions import ExpectedAnswer, Question, endless_question, known_questions
from proof.load.load_request import ClientOutcome, LoadClient, Manner, Record

PIECES = ["Now Tom", " has 3", " + 4", " = 7.\n", "#### 7"]
TEXT = "".join(PIECES)
QUESTION = Question("m", (("user", "Tom has 3 ..."),), 96, ExpectedAnswer(TEXT, 20, "stop"))


def piece(text):
    return {"choices": [{"delta": {"content": text}, "finish_reason": None}]}


def finish(reason="stop"):
    return {"choices": [{"delta": {}, "finish_reason": reason}]}


def usage(tokens=20):
    return {"choices": [], "usage": {"completion_tokens": tokens}}


def events(pieces=PIECES, reason="stop", tokens=20):
    return [*(piece(p) for p in pieces), finish(reason), usage(tokens), "[DONE]"]


def body(text=TEXT, reason="stop", tokens=20):
    return {
        "choices": [{"message": {"content": text}, "finish_reason": reason}],
        "usage": {"completion_tokens": tokens},
    }


def ask(url, manner, question=QUESTION, number=0, **options) -> Record:
    async def run():
        async with LoadClient(url, **options) as client:
            return await client.ask(question, manner, number)

    return asyncio.run(run())


STREAMS = {
    "whole": (streamed(events()), ClientOutcome.OK),
    "no-finish-no-done": (streamed([piece(p) for p in PIECES[:3]]), ClientOutcome.TRUNCATED),
    "no-done": (streamed([*map(piece, PIECES), finish(), usage()]), ClientOutcome.TRUNCATED),
    "nothing-at-all": (streamed([]), ClientOutcome.TRUNCATED),
    "short-but-finished": (streamed(events(PIECES[:3])), ClientOutcome.TRUNCATED),
    "piece-twice": (streamed(events([*PIECES[:2], *PIECES[1:]])), ClientOutcome.WRONG),
    "piece-missing": (streamed(events([*PIECES[:2], *PIECES[3:]])), ClientOutcome.WRONG),
    "another-digit": (streamed(events([*PIECES[:4], "#### 8"])), ClientOutcome.WRONG),
    "more-text": (streamed(events([*PIECES, "#### 7"])), ClientOutcome.WRONG),
    "token-lost": (streamed(events(tokens=19)), ClientOutcome.WRONG),
    "another-reason": (streamed(events(reason="length")), ClientOutcome.WRONG),
    "after-done": (streamed([*events(), usage()]), ClientOutcome.WRONG),
    "not-json": (streamed(["{broken", *events()]), ClientOutcome.WRONG),
    "connection-breaks": (streamed(map(piece, PIECES), ended=False), ClientOutcome.CUT),
    "breaks-after-done": (streamed(events(), ended=False), ClientOutcome.CUT),
    "error-event": (streamed([piece("Now"), {"error": {"message": "aborted"}}, "[DONE]"]), ClientOutcome.CUT),
    "abort": (streamed(events(PIECES[:3], "abort")), ClientOutcome.CUT),
    "closed-at-once": (Script([]), ClientOutcome.CUT),
}


WHOLE = {
    "whole": (whole(body()), ClientOutcome.OK),
    "short": (whole(body(TEXT[:9])), ClientOutcome.TRUNCATED),
    "changed": (whole(body(TEXT.replace("7", "8"))), ClientOutcome.WRONG),
    "token-lost": (whole(body(tokens=19)), ClientOutcome.WRONG),
    "no-text": (whole(body(None)), ClientOutcome.TRUNCATED),
    "not-json": (whole(b"<html>"), ClientOutcome.WRONG),
    "other-json": (whole({"choices": []}), ClientOutcome.WRONG),
    "abort": (whole(body("", "abort")), ClientOutcome.CUT),
    "connection-breaks": (whole(body(), cut=10), ClientOutcome.CUT),
    "closed-at-once": (Script([]), ClientOutcome.CUT),
    "400": (whole({"message": "no"}, 400), ClientOutcome.REFUSED),
    "429": (whole({"message": "later"}, 429), ClientOutcome.REFUSED),
    "503": (whole({"message": "later"}, 503), ClientOutcome.REFUSED),
    "500": (whole({"message": "oops"}, 500), ClientOutcome.FAILED),
}


@pytest.mark.parametrize(
    ("manner", "name"), [*((Manner.STREAM, name) for name in STREAMS), *((Manner.PLAIN, name) for name in WHOLE)]
)
def test_an_answer(manner, name):
    script, expected = {Manner.STREAM: STREAMS, Manner.PLAIN: WHOLE}[manner][name]
    with scripted_server(lambda *_: script) as server:
        record = ask(server.base_url, manner)
    assert record.outcome is expected, record.detail
    assert bool(record.detail) == (expected is not ClientOutcome.OK)
    assert record.status is None or name == str(record.status) or record.status == 200


def test_silence_is_a_hang_whether_or_not_something_came_before():
    for script in (Script([], hold=True), streamed([piece("Now")], ended=False, hold=True)):
        with scripted_server(lambda *_, script=script: script) as server:
            record = ask(server.base_url, Manner.STREAM, hang_s=0.3)
            assert (
                record.outcome is ClientOutcome.HUNG and record.ended - record.began < 50
            )  # by default it waits for 60


def test_a_bad_request_must_be_refused_with_a_message_and_one_that_is_too_large_as_that():
    for script, first, oversized in (
        (whole({"message": "no such model"}, 404), ClientOutcome.REFUSED, ClientOutcome.WRONG),
        (whole({"message": "too large"}, 413), ClientOutcome.REFUSED, ClientOutcome.REFUSED),
        (whole(b"", 400), ClientOutcome.WRONG, ClientOutcome.WRONG),
        (whole(body()), ClientOutcome.WRONG, ClientOutcome.WRONG),
        (whole({"message": "oops"}, 500), ClientOutcome.FAILED, ClientOutcome.WRONG),
    ):
        with scripted_server(lambda *_, script=script: script) as server:
            assert ask(server.base_url, Manner.BAD).outcome is first
            assert ask(server.base_url, Manner.BAD, number=-1).outcome is oversized


@pytest.mark.parametrize("manner", [Manner.LEAVES_STREAM, Manner.LEAVES_PLAIN])
def test_a_client_that_leaves_closes_its_connection(manner):
    script = streamed(events(), pause_s=0.05, hold=True) if manner is Manner.LEAVES_STREAM else Script([], hold=True)
    with scripted_server(lambda *_: script) as server:
        # Two pieces, or a second in which its request reaches the server.
        record = ask(server.base_url, manner, leave_after=2 if manner is Manner.LEAVES_STREAM else 10)
        until(lambda: server.left)
        assert record.outcome is ClientOutcome.LEFT and server.left == 1


def test_an_endless_question_is_judged_by_its_tokens():
    question = endless_question("m", 20)
    for tokens, expected in ((20, ClientOutcome.OK), (19, ClientOutcome.TRUNCATED)):
        with scripted_server(lambda *_, n=tokens: streamed(events(reason="length", tokens=n))) as server:
            assert ask(server.base_url, Manner.STREAM, question).outcome is expected
            assert json.loads(server.bodies[0])["ignore_eos"] is True


def test_a_load_asks_every_question_in_every_manner_and_stops_at_its_total():
    questions = [Question("m", (("user", str(i)),), 96, QUESTION.answer) for i in range(4)]

    def answer(_, content):
        return streamed(events()) if json.loads(content).get("stream") else whole(body())

    with scripted_server(answer) as server, ClientLoad(server.base_url, questions, 3, total=16) as load:
        assert load.wait(280)
    records = load.records
    assert [r.outcome for r in records] == [ClientOutcome.OK] * 16 and server.requests == 16
    assert {(r.question, r.manner) for r in records} == {
        (q, m) for q in range(4) for m in (Manner.STREAM, Manner.PLAIN)
    }


def test_one_wrong_answer_among_many_is_found():
    def answer(number, _):
        return streamed(events(PIECES[:3])) if number == 5 else streamed(events())

    with (
        scripted_server(answer) as server,
        ClientLoad(server.base_url, [QUESTION], 1, mix={Manner.STREAM: 1}, total=9) as load,
    ):
        load.wait(280)
    assert [r.outcome for r in forbidden(load.records)] == [ClientOutcome.TRUNCATED]


def with_gap(gap):
    top = [{"token": "a", "logprob": -0.1}, {"token": "b", "logprob": -0.1 - gap}]
    found = body()
    found["choices"][0]["logprobs"] = {"content": [{"token": "a", "logprob": -0.1, "top_logprobs": top}]}
    return found


def test_known_questions_leave_out_near_ties():
    def answer(number, content):
        if not content:
            return whole({"data": [{"id": "m"}]})
        return whole(with_gap(0.5 if number % 2 else 5.0))

    with scripted_server(answer) as server:
        found = known_questions(server.base_url, 4)
        asked = [json.loads(content)["messages"] for content in server.bodies if content]
    assert [question.answer for question in found] == [QUESTION.answer] * 4
    clear = [messages for number, messages in enumerate(asked) if number % 2 == 1]
    assert [question.body(False)["messages"] for question in found] == clear

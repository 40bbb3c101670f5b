"""The recorder over real HTTP: answers kept, retries, failures counted, servers that go away, files of a crash."""

import json
import re
import threading
import time
from contextlib import contextmanager

import pytest
from support.openai_server import OpenAIServer, Reply
from support.waiting import until

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_lab.accuracy.recorder import COMPLETIONS, REQUESTS, Patience, Recorder, read_answers

QUICK = Patience(attempts=4, first_pause_s=0.01, longest_pause_s=0.05, server_away_s=0.3, request_timeout_s=5)
OK = Reply("ok")


def body(prompt, **more):
    return {"model": "m", "prompt": prompt, "max_tokens": 8, **more}


def ask(recorder, *prompts, show=None, **more):
    """The texts of the answers, asked together."""
    return [answer.text for answer in recorder.ask(COMPLETIONS, [body(prompt, **more) for prompt in prompts], 4, show)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / REQUESTS


@contextmanager
def recording(path, reply):
    with OpenAIServer(reply) as server:
        yield server, Recorder(server.base_url, path, QUICK)


def test_an_answer_is_recorded_and_never_requested_again(path):
    with OpenAIServer(lambda p, n: Reply(f"to {p} ({n})\u2028", "length" if p == "b" else "stop")) as server:
        for _ in range(2):  # the second round is a resumed run
            recorder = Recorder(server.base_url, path, QUICK)
            assert ask(recorder, "a", "b") + ask(recorder, "a") == [f"to {p} (1)\u2028" for p in "aba"]
            assert len(recorder.answers) + len(recorder.reused) == 2
        assert len(recorder.reused) == 2
        assert server.asked == {"a": 1, "b": 1}
        ask(Recorder(server.base_url, path, QUICK), "a", max_tokens=9)  # another limit is another request
        assert server.asked == {"a": 2, "b": 1}
    (kept,) = (answer for answer in read_answers(path).values() if answer.text.startswith("to b"))
    assert (kept.finish_reason, kept.completion_tokens) == ("length", 3)


@pytest.mark.parametrize("fault", [Reply(status=429), Reply(status=500), Reply(status=503), Reply(drop=True)])
def test_a_passing_fault_is_retried(path, fault):
    with recording(path, lambda p, n: fault if n < 3 else Reply("yes")) as (_, recorder):
        assert ask(recorder, "a") == ["yes"]
        assert recorder.retries == 2 and not recorder.failed
    (answer,) = read_answers(path).values()
    assert answer.attempts == 3 and answer.error is None


def test_a_lasting_failure_is_counted_and_a_resumed_run_asks_again(path):
    broken = {"bad"}
    with recording(path, lambda p, n: Reply(status=500) if p in broken else OK) as (server, recorder):
        assert ask(recorder, "bad", "good") == ["", "ok"]
        assert len(recorder.failed) == 1 and server.asked["bad"] == QUICK.attempts
        broken.clear()
        recorder = Recorder(server.base_url, path, QUICK)
        assert ask(recorder, "bad") == ["ok"] and not recorder.failed
        assert server.asked["good"] == 1
    assert [answer.error for answer in read_answers(path).values()] == [None, None]


def test_a_refused_prompt_fails_at_once_and_alone(path):
    with recording(path, lambda p, n: Reply(status=400) if p == "too long" else OK) as (server, recorder):
        said = []
        assert ask(recorder, "too long", "b", show=lambda _, note: said.append(note)) == ["", "ok"]
        (failure,) = recorder.failed
        assert "1 refused" in said and not any("failed" in note for note in said)
        assert failure.error == 'HTTP 400: {"message": "fault 400"}' and failure.attempts == 1
        assert failure.status == 400 and server.asked["too long"] == 1


def test_a_wrong_model_ends_the_run(path):
    refused = pytest.raises(KimiError, match="refuses every request: HTTP 404")
    with recording(path, lambda p, n: Reply(status=404)) as (_, recorder), refused:
        ask(recorder, "a")
    assert read_answers(path) == {}


def test_a_server_that_is_gone_ends_the_run_and_loses_nothing(path):
    with recording(path, lambda p, n: Reply("kept")) as (server, recorder):
        assert ask(recorder, "a") == ["kept"]
        server.close()
        with pytest.raises(KimiError, match="no server has listened"):
            ask(recorder, "b")
        assert not recorder.failed  # not the request's fault
    assert [answer.text for answer in read_answers(path).values()] == ["kept"]


def test_a_server_that_comes_back_in_time_is_waited_for(path):
    first = OpenAIServer(lambda p, n: Reply("before"))
    patient = Patience(attempts=2, first_pause_s=0.02, longest_pause_s=0.1, server_away_s=280)
    recorder = Recorder(first.base_url, path, patient)
    assert ask(recorder, "a") == ["before"]
    first.close()
    answers = []
    waiting = threading.Thread(target=lambda: answers.extend(ask(recorder, "b")))
    waiting.start()
    until(lambda: recorder.retries >= 3)
    with OpenAIServer(lambda p, n: Reply("after"), port=first.server_port):
        waiting.join(280)
    assert answers == ["after"]


def test_an_absence_ends_with_the_next_answer(path):
    """Two short absences hours apart are not one long absence."""
    with recording(path, lambda p, n: OK) as (server, recorder):
        recorder._away_since = time.monotonic() - 1000
        assert ask(recorder, "a") == ["ok"]
        server.close()
        with pytest.raises(KimiError) as caught:
            ask(recorder, "b")
    away = re.search(r"for (\d+) s", caught.value.what)
    assert away is not None and int(away[1]) < 100


def test_retry_after_is_honoured_up_to_the_longest_pause():
    patience = Patience(first_pause_s=1, longest_pause_s=30)
    assert [patience.pause(n) for n in (1, 2, 3, 9)] == [1, 2, 4, 30]
    assert patience.pause(1, "7") == 7 and patience.pause(1, "900") == 30 and patience.pause(2, "soon") == 2


def test_no_more_requests_than_the_concurrency_are_in_flight(path):
    running, most, four = set(), [], threading.Barrier(4, timeout=60)

    def reply(prompt, n):
        running.add(prompt)
        most.append(len(running))
        four.wait()  # that many come, and a fifth has time to
        time.sleep(0.02)
        running.discard(prompt)
        return OK

    with recording(path, reply) as (_, recorder):
        ask(recorder, *map(str, range(20)))
    assert max(most) == 4


def test_a_line_cut_by_a_crash_is_dropped_and_a_foreign_file_refused(path):
    with recording(path, lambda p, n: OK) as (server, recorder):
        ask(recorder, "a"), ask(recorder, "b")
        whole = path.read_text()
        path.write_text(whole[: len(whole) - 40])
        ask(Recorder(server.base_url, path, QUICK), "a", "b")
        assert server.asked == {"a": 1, "b": 2}
        assert len(read_answers(path)) == 2
        path.write_text(json.dumps({"other": 1}) + "\n")
        with pytest.raises(KimiError, match="not the record of a run: line 1: key: Field required"):
            Recorder(server.base_url, path, QUICK)

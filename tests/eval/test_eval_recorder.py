"""The recorder over real HTTP: answers kept, retries, failures counted, servers that go away, files of a crash."""

import json
import re
import threading
import time

import httpx
import pytest
from support.openai_server import OpenAIServer, Reply, openai_server

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.eval.recorder import REQUESTS, Patience, Recorder, prompt_sha256, read_answers

QUICK = Patience(attempts=4, first_pause_s=0.01, longest_pause_s=0.05, server_away_s=0.3, request_timeout_s=5)


def ask(recorder, prompt, **more):
    body = {"model": "m", "prompt": prompt, "max_tokens": 8, **more}
    return httpx.post(f"{recorder.base_url}/v1/completions", json=body, timeout=20)


def text(response):
    assert response.status_code == 200
    return response.json()["choices"][0]["text"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / REQUESTS


def test_an_answer_is_written_down_and_never_asked_for_again(path):
    with openai_server(lambda p, n: Reply(f"to {p} ({n})\u2028", "length" if p == "b" else "stop")) as server:
        for _ in range(2):  # the second round is a resumed run
            with Recorder(server.base_url, path, QUICK) as recorder:
                assert text(ask(recorder, "a")) == "to a (1)\u2028"
                assert text(ask(recorder, "b")) == "to b (1)\u2028"
                assert text(ask(recorder, "a")) == "to a (1)\u2028"
                assert recorder.finished == 2
        assert len(recorder.reused) == 2
        assert server.asked == {"a": 1, "b": 1}
        with Recorder(server.base_url, path, QUICK) as recorder:
            ask(recorder, "a", max_tokens=9)  # another limit is another request
        assert server.asked == {"a": 2, "b": 1}
    kept = {answer.prompt_sha256: answer for answer in read_answers(path).values()}
    assert kept[prompt_sha256("b")].finish_reason == "length"
    assert kept[prompt_sha256("b")].completion_tokens == 3


@pytest.mark.parametrize("fault", [Reply(status=429), Reply(status=500), Reply(status=503), Reply(drop=True)])
def test_what_can_pass_is_tried_again(path, fault):
    answer = lambda p, n: fault if n < 3 else Reply("yes")  # noqa: E731
    with openai_server(answer) as server, Recorder(server.base_url, path, QUICK) as recorder:
        assert text(ask(recorder, "a")) == "yes"
        assert recorder.retries == 2 and not recorder.failed
    (answer,) = read_answers(path).values()
    assert answer.attempts == 3 and answer.error is None


def test_what_keeps_failing_is_counted_and_asked_again_in_a_resumed_run(path):
    broken = {"yes": True}
    with openai_server(lambda p, n: Reply(status=500) if broken["yes"] and p == "bad" else Reply("ok")) as server:
        with Recorder(server.base_url, path, QUICK) as recorder:
            assert text(ask(recorder, "bad")) == "" and text(ask(recorder, "good")) == "ok"
            assert len(recorder.failed) == 1 and recorder.fatal is None
            assert server.asked["bad"] == QUICK.attempts
        broken["yes"] = False
        with Recorder(server.base_url, path, QUICK) as recorder:
            assert text(ask(recorder, "bad")) == "ok" and not recorder.failed
        assert server.asked["good"] == 1
    errors = [answer.error for answer in read_answers(path).values()]
    assert errors == [None, None]


def test_a_refused_prompt_fails_at_once_and_alone(path):
    answer = lambda p, n: Reply(status=400) if p == "too long" else Reply("ok")  # noqa: E731
    with openai_server(answer) as server, Recorder(server.base_url, path, QUICK) as recorder:
        assert text(ask(recorder, "too long")) == "" and text(ask(recorder, "b")) == "ok"
        (failure,) = recorder.failed.values()
        assert failure.error == 'HTTP 400: {"message": "fault 400"}' and failure.attempts == 1
        assert failure.status == 400 and server.asked["too long"] == 1


def test_a_wrong_model_ends_the_run(path):
    with openai_server(lambda p, n: Reply(status=404)) as server, Recorder(server.base_url, path, QUICK) as recorder:
        assert ask(recorder, "a").status_code == 503
        assert recorder.fatal is not None and "refuses every request: HTTP 404" in recorder.fatal
    assert read_answers(path) == {}


def test_a_server_that_is_gone_ends_the_run_and_loses_nothing(path):
    server = OpenAIServer(lambda p, n: Reply("kept"))
    with Recorder(server.base_url, path, QUICK) as recorder:
        assert text(ask(recorder, "a")) == "kept"
        server.close()
        assert ask(recorder, "b").status_code == 503
        assert recorder.fatal is not None and "no server has listened" in recorder.fatal
        assert not recorder.failed  # not the request's fault
    assert [answer.text for answer in read_answers(path).values()] == ["kept"]


def test_a_server_that_comes_back_in_time_is_waited_for(path):
    first = OpenAIServer(lambda p, n: Reply("before"))
    patient = Patience(attempts=2, first_pause_s=0.02, longest_pause_s=0.1, server_away_s=20)
    with Recorder(first.base_url, path, patient) as recorder:
        assert text(ask(recorder, "a")) == "before"
        first.close()
        answers = []
        waiting = threading.Thread(target=lambda: answers.append(text(ask(recorder, "b"))))
        waiting.start()
        end = time.monotonic() + 20
        while recorder.retries < 3 and time.monotonic() < end:
            time.sleep(0.01)
        with openai_server(lambda p, n: Reply("after"), port=first.port):
            waiting.join(20)
    assert answers == ["after"]


def test_an_absence_ends_with_the_next_answer(path):
    """Two short absences hours apart are not one long absence."""
    with openai_server(lambda p, n: Reply("ok")) as server, Recorder(server.base_url, path, QUICK) as recorder:
        recorder._away_since = time.monotonic() - 1000
        assert text(ask(recorder, "a")) == "ok"
        server.close()
        assert ask(recorder, "b").status_code == 503
        away = re.search(r"for (\d+) s", recorder.fatal)
        assert away is not None and int(away[1]) < 100


def test_retry_after_is_honoured_up_to_the_longest_pause():
    patience = Patience(first_pause_s=1, longest_pause_s=30)
    assert [patience.pause(n) for n in (1, 2, 3, 9)] == [1, 2, 4, 30]
    assert patience.pause(1, "7") == 7 and patience.pause(1, "900") == 30 and patience.pause(2, "soon") == 2


def test_chat_requests_and_empty_contents(path):
    with openai_server(lambda p, n: Reply("")) as server, Recorder(server.base_url, path, QUICK) as recorder:
        messages = [{"role": "user", "content": "Äpfel"}]
        response = httpx.post(
            f"{recorder.base_url}/v1/chat/completions", json={"model": "m", "messages": messages}, timeout=20
        )
        assert response.json()["choices"][0]["message"]["content"] == ""
    (answer,) = read_answers(path).values()
    assert answer.prompt_sha256 == prompt_sha256(messages) and answer.error is None


def test_a_line_cut_by_a_crash_is_dropped_and_a_foreign_file_refused(path):
    with openai_server(lambda p, n: Reply("ok")) as server:
        with Recorder(server.base_url, path, QUICK) as recorder:
            ask(recorder, "a"), ask(recorder, "b")
        whole = path.read_text()
        path.write_text(whole[: len(whole) - 40])
        with Recorder(server.base_url, path, QUICK) as recorder:
            ask(recorder, "a"), ask(recorder, "b")
        assert server.asked == {"a": 1, "b": 2}
        assert len(read_answers(path)) == 2
        path.write_text(json.dumps({"other": 1}) + "\n")
        with pytest.raises(KimiError, match="line 1 is not a recorded request"), Recorder(server.base_url, path, QUICK):
            pass

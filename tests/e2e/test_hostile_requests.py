"""The gateway in front of a real engine: what would stop SGLang is answered with 4xx, and others do not notice."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from socket import create_connection
from typing import Any

import httpx
import psutil
import pytest

from kimi_w4a8_eagle3.engine.client import EngineClient
from kimi_w4a8_eagle3.engine.fronted import FrontedEngine
from kimi_w4a8_lab.accuracy.tokens import TokenClient

pytestmark = pytest.mark.server

MODEL = "kimi-k2.5-tiny"
QUESTION = [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many apples?"}]
CHAT = {"model": MODEL, "messages": QUESTION, "max_tokens": 4}
COMPLETION = {"model": MODEL, "prompt": "Tom has", "max_tokens": 4}


def schema(value: Any) -> dict[str, Any]:
    return {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}


# Each of these ended SGLang's engine, kept it busy for minutes or was answered with 500. What the gateway refuses by
# the body alone is in support/hostile_bodies.py.
HOSTILE: dict[str, tuple[str, dict[str, Any]]] = {
    "top_k beyond int32, chat": ("/v1/chat/completions", {**CHAT, "top_k": 2**31}),
    "empty prompt, completions": ("/v1/completions", {**COMPLETION, "prompt": ""}),
    "negative token id": ("/v1/completions", {**COMPLETION, "prompt": [-1]}),
    "schema without an end": ("/v1/chat/completions", schema({"$ref": "#"})),
    **{
        f"{name} of {value:g}": ("/v1/chat/completions", {**CHAT, name: value})
        for name, value in (("temperature", 1e39), ("top_p", 1e-300), ("repetition_penalty", 1e-300))
    },
    "64,000 parts": (
        "/v1/chat/completions",
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 4000}] * 16},
    ),
    "a prompt of 100,000 words": ("/v1/completions", {**COMPLETION, "prompt": "word " * 100_000}),
}


@pytest.fixture(scope="module")
def healthy(eagle3: FrontedEngine) -> str:
    """Answer to an ordinary client, before the hostile requests."""
    with EngineClient(*eagle3.address) as client:
        return client.chat(QUESTION[0]["content"], 8, separate_reasoning=False).text


@pytest.mark.parametrize(("path", "body"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_requests_are_refused_and_disturb_no_other_client(
    eagle3: FrontedEngine, client: EngineClient, healthy: str, path: str, body: dict[str, Any]
) -> None:
    response = httpx.post(eagle3.base_url + path, json=body, timeout=60)
    assert 400 <= response.status_code < 500, response.text[:300]
    answer = response.json()
    error = answer.get("error", answer)
    assert error if isinstance(error, str) else error["message"], "a refusal says why"
    assert client.chat(QUESTION[0]["content"], 8, separate_reasoning=False).text == healthy


def test_a_request_that_leaves_no_token_fails_alone(eagle3: FrontedEngine) -> None:
    """All its logits are infinite: their probabilities are NaN, which raises for every request of the same batch."""
    url = eagle3.base_url + "/v1/completions"
    greedy = {**COMPLETION, "temperature": 0}
    expected = httpx.post(url, json=greedy, timeout=60).json()["choices"][0]["text"]
    dead = {**COMPLETION, "temperature": 1, "json_schema": '{"$ref": "#"}'}
    with ThreadPoolExecutor(24) as pool:  # many at once, so that some of both kinds are in one batch
        answers = list(pool.map(lambda body: httpx.post(url, json=body, timeout=60), [greedy, dead] * 36))
    assert {answer.json()["choices"][0]["text"] for answer in answers[::2]} == {expected}
    assert {answer.status_code for answer in answers[1::2]} == {400}


def test_a_stream_runs_on_while_another_client_misbehaves(eagle3: FrontedEngine, client: TokenClient) -> None:
    whole: dict[str, Any] = {"separate_reasoning": False, "ignore_eos": True}
    expected = client.chat(QUESTION[0]["content"], 120, **whole).text
    pieces = []
    for number, piece in enumerate(
        client.stream({"messages": QUESTION, "max_tokens": 120, "temperature": 0.0, **whole})
    ):
        pieces += [choice["delta"].get("content") or "" for choice in piece["choices"]]
        if number % 5 == 0:
            path, body = list(HOSTILE.values())[number % len(HOSTILE)]
            assert 400 <= httpx.post(eagle3.base_url + path, json=body, timeout=60).status_code < 500
    assert len(pieces) > 10
    assert "".join(pieces) == expected


def test_connections_that_claim_memory_and_send_nothing_leave_it_to_a_large_body(eagle3: FrontedEngine) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {2**25}\r\n\r\n".encode()
    with ExitStack() as silent:
        for _ in range(20):
            silent.enter_context(create_connection(("127.0.0.1", int(eagle3.base_url.rpartition(":")[2])))).sendall(
                head
            )
        time.sleep(0.5)
        body = {**COMPLETION, "prompt": "word " * 5_600_000}
        answer = httpx.post(eagle3.base_url + "/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400 and "too long" in answer.text, answer.text[:300]  # and not 503


@pytest.mark.slow
def test_a_costly_grammar_fails_in_a_process_while_another_client_goes_on(
    eagle3: FrontedEngine, client: EngineClient, healthy: str
) -> None:
    """One mask takes seconds, and one grammar crashes xgrammar 0.2.1."""
    paths = [eagle3.base_url + path for path in ("/v1/completions", "/v1/chat/completions", "/v1/chat/completions")]
    slow = {**COMPLETION, "regex": ".?" * 60}
    crash = {"properties": {f"p{index}": {"type": "string"} for index in range(600)}, "minProperties": 500}
    wide = {"items": {"anyOf": [{"type": "array", "items": {"const": index}} for index in range(1200)]}}
    answers = []
    with ThreadPoolExecutor(4) as pool:
        for path, body in zip(paths, (slow, schema(crash), schema(wide)), strict=True):
            answers.append(pool.submit(httpx.post, path, json=body, timeout=280))
            while not answers[-1].done():
                assert client.chat(QUESTION[0]["content"], 8, separate_reasoning=False).text == healthy
                time.sleep(0.1)
    slow_mask, crashed, admitted = (answer.result() for answer in answers)
    too_slow = slow_mask.json()["error"]["message"]
    assert slow_mask.status_code == 400 and "finding the tokens that may follow takes" in too_slow
    assert crashed.status_code == 400 and admitted.status_code == 200, admitted.text[:300]


def test_an_engine_on_loopback_listens_nowhere_else(eagle3: FrontedEngine) -> None:
    processes = [psutil.Process(eagle3.pid), *psutil.Process(eagle3.pid).children(recursive=True)]
    sockets = [socket for process in processes for socket in process.net_connections("inet")]
    assert {socket.laddr.ip for socket in sockets if socket.status == "LISTEN"} == {"127.0.0.1"}


def test_null_means_not_sent(eagle3: FrontedEngine) -> None:
    """SGLang answers 500 to the first of them."""
    for path, body in (
        ("/v1/completions", {**COMPLETION, "n": None, "stop": None}),
        ("/v1/chat/completions", {**CHAT, "n": None, "tools": None, "user": None}),
    ):
        assert httpx.post(eagle3.base_url + path, json=body, timeout=60).status_code == 200

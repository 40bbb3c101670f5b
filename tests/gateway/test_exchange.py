"""One request over HTTP: bodies, statuses, streams with signs of life, errors in streams, clients that leave."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from support.gateway_app import MODEL, App, ScriptedEngine, Wire, events_of, until

from kimi_w4a8_eagle3.gateway import exchange, metrics
from kimi_w4a8_eagle3.gateway.engine import EngineGone
from kimi_w4a8_eagle3.gateway.errors import Refusal
from kimi_w4a8_eagle3.gateway.limits import Running

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
USER = [{"role": "user", "content": "?"}]
BODY: dict[str, Any] = {"model": MODEL, "messages": USER, "max_tokens": 64}
STREAM = {**BODY, "stream": True}


@pytest.mark.parametrize(
    ("path", "body", "answers"),
    [(CHAT, BODY, 1), (CHAT, STREAM, 1), (MESSAGES, STREAM, 1), (CHAT, {**STREAM, "n": 3, "seed": 5}, 3)],
)
def test_all_answers_of_a_client_that_leaves_are_aborted(path: str, body: dict[str, Any], answers: int) -> None:
    async def leave() -> ScriptedEngine:
        engine = ScriptedEngine()
        engine.wait = asyncio.Event()
        wire = Wire(App(engine), path, body)
        await until(lambda: len(engine.seen) == answers)
        wire.leave()
        await asyncio.wait_for(wire.task, 10)
        return engine

    engine = asyncio.run(leave())
    assert sorted(engine.aborted) == sorted(asked["rid"] for asked in engine.seen)
    if "seed" in body:
        assert [asked["sampling_params"]["sampling_seed"] for asked in engine.seen] == [5, 6, 7]


@pytest.mark.parametrize("body", [BODY, STREAM, {**STREAM, "n": 3}])
def test_an_answer_that_was_sent_to_its_end_is_counted_as_answered(body: dict[str, Any]) -> None:
    async def ask() -> None:
        await Wire(App(ScriptedEngine()), CHAT, body).task

    counted = metrics.REQUESTS.labels(CHAT, "200")._value
    before = counted.get()
    asyncio.run(ask())
    assert counted.get() == before + 1


def test_a_client_that_half_closes_gets_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "HALF_CLOSED_S", 0.01)

    async def ask() -> Wire:
        engine = ScriptedEngine()
        engine.wait = asyncio.Event()
        wire = Wire(App(engine), CHAT, BODY)
        await until(lambda: engine.seen)
        wire.half_close()
        await until(lambda: wire.body == b" ")  # white space, which tells whether it has left
        engine.wait.set()
        await asyncio.wait_for(wire.task, 10)
        return wire

    wire = asyncio.run(ask())
    assert json.loads(wire.body)["choices"][0]["message"]["content"] == "Done."


@pytest.mark.parametrize(("path", "ping"), [(CHAT, b": ping\n\n"), (MESSAGES, b"event: ping\n")])
def test_a_stream_gives_signs_of_life_while_the_model_is_silent(
    path: str, ping: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "GRACE_S", 0.01)
    monkeypatch.setattr(exchange, "SILENCE_S", 0.01)

    async def ask() -> bytes:
        engine = ScriptedEngine()
        engine.wait = asyncio.Event()
        wire = Wire(App(engine), path, STREAM)
        await until(lambda: wire.body.count(ping) >= 3)
        engine.wait.set()
        await asyncio.wait_for(wire.task, 10)
        return wire.body

    body = asyncio.run(ask())
    assert b"message_start" in body[: body.index(ping)] if path == MESSAGES else b"role" in body[: body.index(ping)]
    said = [delta for event in events_of(body.decode()) for delta in texts(event)]
    assert "".join(said) == "Done."


def texts(event: dict[str, Any]) -> list[str]:
    """Return the texts of an event of either API."""
    deltas = [choice["delta"] for choice in event.get("choices", ())] or [event.get("delta") or {}]
    return [delta.get("content") or delta.get("text") or "" for delta in deltas]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_an_error_after_the_first_event_ends_the_stream_in_the_vendors_form(path: str) -> None:
    engine = ScriptedEngine("I think.</think>Done.", step=4)
    engine.fail_after, engine.broken = 3, EngineGone("ServerDisconnectedError")
    asked = {"model": MODEL, "input": "?", "stream": True} if path == RESPONSES else STREAM
    answer = App(engine).ask(path, asked)
    assert answer.status_code == 200
    last = events_of(answer.text)[-1]
    if path == RESPONSES:
        assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "server_error")
        return
    error = last["error"]
    assert error["type"] == "overloaded_error" and "not available" in error["message"]
    assert answer.text.endswith("data: [DONE]\n\n") == (path == CHAT)


@pytest.mark.parametrize("body", [BODY, STREAM])
def test_an_error_before_it_keeps_its_status(body: dict[str, Any]) -> None:
    engine = ScriptedEngine()
    engine.fail_after, engine.broken = 0, Refusal("the queue is full", status=503)
    answer = App(engine).ask(CHAT, body)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


def test_an_engine_that_does_not_serve_is_503_with_retry_after() -> None:
    app = App(ScriptedEngine())
    app.facts.phase = "starting"
    answer = app.ask(CHAT, BODY)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "starting" in answer.json()["error"]["message"]


def test_a_place_is_free_at_the_last_byte_and_a_key_has_so_many() -> None:
    async def ask() -> list[int]:
        engine = ScriptedEngine()
        app = App(engine, running=Running(1))
        statuses = []
        async with app.client() as client:
            for _ in range(5):
                statuses.append((await client.post(CHAT, json=STREAM)).status_code)
        engine.wait = asyncio.Event()
        first = Wire(app, CHAT, STREAM)
        await until(lambda: len(engine.seen) == 6)
        second = Wire(app, CHAT, STREAM)
        await second.task
        engine.wait.set()
        await first.task
        third = Wire(app, CHAT, STREAM)
        await third.task
        return [*statuses, *(wire.sent[0]["status"] for wire in (first, second, third))]

    assert asyncio.run(ask()) == [200, 200, 200, 200, 200, 200, 429, 200]


def test_running_streams_of_one_key_have_a_bound_of_candidates() -> None:
    async def ask() -> list[int]:
        engine = ScriptedEngine()
        engine.wait = asyncio.Event()
        app = App(engine)
        body = {**STREAM, "logprobs": True, "top_logprobs": 128, "max_tokens": 8}
        wires = []
        for number in range(5):
            wires.append(Wire(app, CHAT, body))
            await until(lambda: len(engine.seen) > number or wires[-1].sent)  # noqa: B023  # waits in this turn
        refused = [wire for wire in wires if wire.sent]
        engine.wait.set()
        await asyncio.gather(*(wire.task for wire in wires))
        return [wire.sent[0]["status"] for wire in refused]

    assert asyncio.run(ask()) == [429, 429]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", CHAT, 405), ("POST", "/v1/models", 405), ("GET", "/v1/none", 404), ("GET", "/v1/models/other", 404),
     ("GET", f"/v1/models/{MODEL}", 200), ("HEAD", "/", 200), ("GET", "/flush_cache", 404), ("POST", "/generate", 404),
     ("GET", "/server_info", 200), ("POST", "/metrics", 405)],
)  # fmt: skip
def test_only_the_tables_paths_and_methods_are_served(method: str, path: str, status: int) -> None:
    async def ask() -> Any:
        async with App(ScriptedEngine()).client() as client:
            return await client.request(method, path)

    answer = asyncio.run(ask())
    assert answer.status_code == status and "request-id" in answer.headers
    if status >= 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    if method == "HEAD":
        assert answer.content == b""


def test_a_body_that_is_too_large_or_compressed_is_refused() -> None:
    app = App(ScriptedEngine(), max_body=1000)
    assert app.ask(CHAT, b"x" * 1001).status_code == 413
    assert app.ask(CHAT, BODY, **{"content-encoding": "gzip"}).status_code == 415


def test_streamed_candidates_are_each_tokens_own() -> None:
    body = {**STREAM, "logprobs": True, "top_logprobs": 2, "max_tokens": 64}
    words = "I.</think>Zürich 東京"
    chunks = events_of(App(ScriptedEngine(words, step=99)).ask(CHAT, body).text)
    logprobs = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    found = [one for part in logprobs for one in part["content"]]
    whole = App(ScriptedEngine(words)).ask(CHAT, {**body, "stream": False}).json()
    assert found == whole["choices"][0]["logprobs"]["content"] and len(found) > 8
    for one in found:
        assert one["top_logprobs"][0]["token"] == one["token"] and one["top_logprobs"][0]["bytes"] == one["bytes"]
    said = b"".join(bytes(one["bytes"]) for one in found)
    assert said.decode() == words

"""Bounds of what one client may cost others: names, bytes and turns of requests, and answers without a token."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.gateway_app import MODEL, App, ScriptedEngine, Wire, events_of, until

from kimi_w4a8_eagle3.gateway import exchange, limits
from kimi_w4a8_eagle3.gateway.app import Gateway
from kimi_w4a8_eagle3.gateway.config import GatewayConfig
from kimi_w4a8_eagle3.gateway.keys import Client
from kimi_w4a8_laptop import tiny
from proof.reference import BEGIN, PAGE, metrics, tables

CHAT, MESSAGES, TEXT = "/v1/chat/completions", "/v1/messages", "/v1/completions"
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "?"}], "max_tokens": 64}


class TwoClients:
    """Keys of two clients, by the header that names them."""

    first = "key"

    def admit(self, headers: dict[bytes, bytes]) -> Client:
        return Client(headers.get(b"x-api-key", b"honest").decode(), "key")


def with_two_clients() -> App:
    app = App(ScriptedEngine())
    app.keys = TwoClients()  # type: ignore[assignment]
    return app


HOSTILE = [(b"x-api-key", b"hostile")]


def noting(app: App, note: Callable[[bytes], Any]) -> list[Any]:
    """Return the list into which goes what is noted of each body when it is read."""
    found, read = list[Any](), app.service.read
    app.service.read = lambda endpoint, raw: found.append(note(raw)) or read(endpoint, raw)  # type: ignore
    return found


def test_names_are_counted_before_anything_is_read() -> None:
    answer = App(engine := ScriptedEngine()).ask(CHAT, {**BODY, **{f"x{number}": 1 for number in range(16367)}})
    assert answer.status_code == 400 and "has 16370 fields, and 256 are allowed" in answer.text
    assert engine.seen == []


def test_a_client_waits_for_one_request_of_another_and_not_for_all() -> None:
    async def ask() -> list[str]:
        app = with_two_clients()
        order = noting(app, lambda raw: json.loads(raw)["model"])
        bodies = [{**BODY, "model": f"{MODEL}:hostile"}] * 50
        wires = [Wire(app, MESSAGES, body, headers=HOSTILE) for body in bodies]
        wires.append(Wire(app, MESSAGES, {**BODY, "model": f"{MODEL}:honest"}))
        await asyncio.gather(*(wire.task for wire in wires))
        assert {wire.sent[0]["status"] for wire in wires} == {200}
        return order

    order = asyncio.run(ask())
    assert len(order) == 51 and order.index(f"{MODEL}:honest") <= 1


def test_a_large_body_is_read_beside_the_event_loop() -> None:
    app = App(ScriptedEngine())
    threads = noting(app, lambda _: threading.current_thread() is threading.main_thread())
    for text in ("?", "? " * exchange.THREAD_BYTES):
        assert app.ask(CHAT, {**BODY, "messages": [{"role": "user", "content": text}]}).status_code in (200, 400)
    assert threads == [True, False]


def test_bodies_of_one_client_that_wait_have_a_bound_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_UNREAD_BYTES", 1000)

    async def ask() -> list[int]:
        app = with_two_clients()
        cut = Wire(app, CHAT, {"x": "y" * 900}, headers=HOSTILE, more=True)
        await until(lambda: cut.arriving.empty())
        more = [Wire(app, CHAT, BODY, headers=headers) for headers in (HOSTILE, [])]
        await asyncio.gather(*(wire.task for wire in more))
        cut.leave()
        await cut.task
        last = Wire(app, CHAT, BODY, headers=HOSTILE)
        await last.task
        return [wire.sent[0]["status"] for wire in (*more, last)]

    assert asyncio.run(ask()) == [429, 200, 200]


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_fill_the_prefix_cache_of_a_message(stream: bool) -> None:
    app = App(engine := ScriptedEngine())
    answer = app.ask(MESSAGES, {**BODY, "max_tokens": 0, "stream": stream})
    assert answer.status_code == 200 and engine.seen[0]["sampling_params"]["max_new_tokens"] == 1
    events = events_of(answer.text) if stream else [{**answer.json(), "delta": answer.json()}]
    assert events[-2 if stream else -1]["delta"]["stop_reason"] == "max_tokens"
    assert [event["usage"]["output_tokens"] for event in events if "usage" in event] == [0]
    assert not any("content_block" in event.get("type", "") for event in events)
    assert app.ask(CHAT, {**BODY, "max_tokens": 0}).status_code == 400


def test_no_tokens_of_a_text_completion_are_its_echo() -> None:
    body = {"model": MODEL, "prompt": "What is", "max_tokens": 0, "echo": True}
    answer = App(ScriptedEngine()).ask(TEXT, body).json()
    assert answer["choices"][0]["text"] == "What is" and answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_the_chunks_of_a_stream_have_one_id_and_one_time(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(10**6))
    monkeypatch.setattr("time.time", lambda: next(now))
    asked = {"prompt": "?"} if path == TEXT else {"messages": BODY["messages"]}
    chunks = events_of(App(ScriptedEngine()).ask(path, {"model": MODEL, **asked, "stream": True}).text)
    assert len(chunks) > 2 and len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1


@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids"])
@pytest.mark.parametrize("token", [640, -1, 10**30, "x", "٣"])
def test_ids_that_the_model_lacks_never_reach_the_engine(name: str, token: Any) -> None:
    value = {str(token): 1} if name == "logit_bias" else [token]
    for path, asked in ((CHAT, {"messages": BODY["messages"]}), (TEXT, {"prompt": "?"})):
        answer = App(engine := ScriptedEngine()).ask(path, {"model": MODEL, **asked, name: value})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name and engine.seen == []
        fine = {"639": 1} if name == "logit_bias" else [639]
        assert App(ScriptedEngine()).ask(path, {"model": MODEL, **asked, name: fine}).status_code == 200


def test_a_worker_never_collects_what_it_loaded(tmp_path: Path) -> None:
    """A full collection of it would hold the event loop for more than 50 ms."""

    async def serve() -> None:
        messages, sent = asyncio.Queue[dict[str, Any]](), list[Any]()

        async def send(message: Any) -> None:
            sent.append(message)

        config = GatewayConfig(str(tiny.target_path()), MODEL, engine_file=str(tmp_path / "engine.json"))
        served = asyncio.ensure_future(Gateway(config)({"type": "lifespan"}, messages.get, send))
        messages.put_nowait({"type": "lifespan.startup"})
        await until(lambda: gc.get_freeze_count() > before)
        messages.put_nowait({"type": "lifespan.shutdown"})
        await served

    before = gc.get_freeze_count()
    try:
        asyncio.run(serve())
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("seed", [2**63 - 1, 2**64 - 1, -(2**63)])
def test_seeds_of_any_size_are_numbers_of_the_engine(seed: int) -> None:
    for path, asked in ((CHAT, {"messages": BODY["messages"]}), (TEXT, {"prompt": "?"})):
        App(engine := ScriptedEngine()).ask(path, {"model": MODEL, **asked, "n": 2, "seed": seed})
        seeds = [body["sampling_params"]["sampling_seed"] for body in engine.seen]
        assert len(set(seeds)) == 2 and all(-(2**63) <= one < 2**63 for one in seeds)


def test_min_tokens_and_a_grammar_are_not_both_promised() -> None:
    shaped = {**BODY, "min_tokens": 5, "response_format": {"type": "json_object"}}
    assert App(engine := ScriptedEngine()).ask(CHAT, shaped).status_code == 400 and engine.seen == []
    assert App(ScriptedEngine()).ask(CHAT, {**BODY, "min_tokens": 5}).status_code == 200


def test_the_reference_page_is_what_the_code_has() -> None:
    assert BEGIN + tables() in PAGE.read_text(), "python -m proof.reference writes it"


def test_metrics_of_every_kind_are_found() -> None:
    names = {name.strip("`") for name, _ in metrics()}
    assert {"kimi_engine_restarts_total", "kimi_gateway_requests_total", "kimi_page_guard_cap_tokens"} <= names

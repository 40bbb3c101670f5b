"""Requests and answers through the door: size limits, concurrency limits, clients that disconnect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import httpx
import pytest
from starlette.responses import PlainTextResponse
from support.door_app import CHAT, KEYS, Engine, ask, events_of, guarded, message, posted

from kimi_w4a8_eagle3.door import computed, middleware
from kimi_w4a8_eagle3.door.computed import Computed
from kimi_w4a8_eagle3.door.settings import DoorSettings
from kimi_w4a8_eagle3.sglang_plugin.http.request_guard import (
    _check_room,
    bound_answer,
    check_copies,
    check_numbers,
    check_prompt,
    check_prompt_logprobs,
)


def test_a_body_that_is_too_large() -> None:
    engine = Engine()
    door = guarded(engine, DoorSettings(max_body_bytes=1000))
    big = {**CHAT, "user": "x" * 2000}

    for response in (
        ask(door, "POST", "/v1/chat/completions", json=big),
        ask(door, "POST", "/v1/chat/completions", content=iter_bytes(json.dumps(big).encode())),
    ):
        assert response.status_code == 413
        assert "larger than 1000 bytes" in message(response)
    assert engine.seen == []
    assert ask(door, "POST", "/v1/chat/completions", json={**CHAT, "user": "x" * 500}).status_code == 200


async def iter_bytes(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 100):
        yield body[start : start + 100]


def test_too_many_requests_are_refused_with_a_retry_time() -> None:
    engine = Engine()
    door = guarded(engine, DoorSettings(max_concurrent=2))

    async def scenario() -> tuple[httpx.Response, httpx.Response, list[int]]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(door), base_url="http://127.0.0.1:30000") as client:
            waiting = [
                asyncio.create_task(client.post("/v1/chat/completions", json={**CHAT, "user": "wait"}))
                for _ in range(2)
            ]
            while len(engine.seen) < 2:
                await asyncio.sleep(0.001)
            third = await client.post("/v1/completions", json={"prompt": "x"})
            models = await client.get("/v1/models")
            tokens = await client.post("/v1/tokenize", json={"prompt": "x"})
            assert models.status_code == tokens.status_code == 200  # neither generates
            engine.release.set()
            done = [response.status_code for response in await asyncio.gather(*waiting)]
            return third, await client.post("/v1/completions", json={"prompt": "x"}), done

    refused, after, done = asyncio.run(scenario())
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert done == [200, 200]
    assert after.status_code == 200


def test_a_client_that_leaves_is_seen_by_the_engine_and_frees_its_place() -> None:
    engine = Engine()
    door = guarded(engine, DoorSettings(max_concurrent=1))
    body = json.dumps({**CHAT, "user": "until I leave"}).encode()

    scope = posted("/v1/chat/completions", (b"content-type", b"application/json"))
    events_of(door, scope, {"type": "http.request", "body": body}, {"type": "http.disconnect"})
    assert engine.left.is_set()
    assert ask(door, "POST", "/v1/chat/completions", json=CHAT).status_code == 200


def test_headers_set_no_field_that_a_body_may_not() -> None:
    engine = Engine()
    headers = {"X-Override-Rid": "one", "x-override-priority": "5", "x-request-id": "mine"}
    assert ask(guarded(engine, DoorSettings()), "POST", "/v1/chat/completions", json=CHAT, headers=headers).is_success
    assert "x-request-id" in engine.headers
    assert not [name for name in engine.headers if name.startswith("x-override")]


def test_an_answer_is_charged_to_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "ANSWER_S", 1000.0)
    door = guarded(Engine(), KEYS)
    response = ask(door, "POST", "/v1/chat/completions", json=CHAT, headers={"Authorization": f"Bearer {KEYS.api_key}"})
    used = [door._shares.used(account) for account in ("the client key", "('192.0.2.7', 4711)", "another")]
    assert used == pytest.approx([1000.0 * len(response.content)] * 2 + [0.0], rel=0.1)


def test_an_answer_passes_piece_by_piece() -> None:
    passed: list[bytes] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in (b"a", b"b"):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            assert passed[-1] == piece  # nothing is held back
        await send({"type": "http.response.body", "body": b"c", "more_body": False})

    door = guarded(Engine(), DoorSettings())
    door._app = inner

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        async def pass_on(event: Any) -> None:
            passed.append(event.get("body", b"start"))
            await send(event)

        await door(scope, receive, pass_on)

    events_of(watched, posted("/generate"), {"type": "http.request", "body": b"{}"})
    assert passed == [b"start", b"a", b"b", b"c"]


def test_a_preflight_reaches_the_application() -> None:
    engine = Engine()
    engine.app.add_api_route("/v1/models", lambda: PlainTextResponse("preflight"), methods=["OPTIONS"])
    assert ask(guarded(engine, KEYS), "OPTIONS", "/v1/models").text == "preflight"


def test_the_request_guard_refuses_what_the_scheduler_cannot_take() -> None:
    check_prompt([0, 1, 99], vocabulary=100, max_tokens=3)
    check_copies(4096, 2, context=8192)
    check_copies(8193, 1, context=8192)  # `check_prompt` has its own limit
    with pytest.raises(ValueError, match="asks for 128 times 4000"):
        check_copies(4000, 128, context=8192)
    for ids in ([], [-1], [100], [1] * 4):
        with pytest.raises(ValueError, match=r"prompt|token ids"):
            check_prompt(ids, vocabulary=100, max_tokens=3)
    check_numbers(None, 100)
    check_numbers({"top_k": 2**31 - 1, "stop_token_ids": [99], "stop_regex": ["a+"], "max_new_tokens": None}, 100)
    check_numbers({"logit_bias": {"1": -100, "2": 0.5}}, 100)
    for bad in ({"logit_bias": {"1": 1e39}}, {"top_k": 2**31}, {"stop_token_ids": [100]}, {"stop_regex": "("}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            check_numbers(bad, 100)


@pytest.mark.parametrize(("pool", "most"), [(None, 99), (200, 99), (50, 49)])
def test_a_prompt_that_exceeds_the_context_or_the_pool_reaches_no_scheduler(pool: int | None, most: int) -> None:
    manager: Any = SimpleNamespace(allow_auto_truncate=False, validate_total_tokens=True, context_len=100)
    manager.max_req_input_len, asked = pool, SimpleNamespace(sampling_params=None)
    _check_room(manager, most, asked)
    with pytest.raises(ValueError, match=f"prompt is too long: {most + 1} tokens > {most} maximum"):
        _check_room(manager, most + 1, asked)


def test_logprobs_of_a_prompt_are_bounded_by_their_product() -> None:
    check_prompt_logprobs(8180, None, 128, [1] * 4096)  # of the answer alone
    check_prompt_logprobs(8180, 0, 8, None)
    check_prompt_logprobs(8180, 8100, 128, None)
    for start, top, ids in ((0, 128, None), (0, 0, [1] * 100), (0, 5, [1] * 5)):
        with pytest.raises(ValueError, match="positions times candidates"):
            check_prompt_logprobs(8180, start, top, ids)


def test_an_answer_without_a_limit_ends_where_its_logprobs_do() -> None:
    cases = [(None, False, 128, 1, 63), (None, True, 128, 2, 254), (8, False, 128, 1, 8), (None, False, None, 1, 5000)]
    for given, stream, top, n, most in (*cases, (4998, False, 20, 1, 390), (None, False, 128, 99, 1)):
        params = {"max_new_tokens": given, "n": n}
        bound_answer(cast(Any, SimpleNamespace(sampling_params=params, stream=stream, top_logprobs_num=top)), 5000)
        assert params == {"max_new_tokens": most, "n": n}
    bound_answer(cast(Any, SimpleNamespace(sampling_params={})), 5000)  # SGLang's usual 128 tokens


def test_public_answers_are_computed_once_for_many_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computed, "_SHARE", 1e9)  # however slow this machine is
    monkeypatch.setattr(computed, "_MOST_S", 60.0)
    counted = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal counted
        counted += 1
        assert b"accept-encoding" not in dict(scope["headers"])
        await asyncio.sleep(0.001)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"%d" % counted})

    door = guarded(Engine(), KEYS)
    door._computed, door._supervisor = Computed(app), "supervisor-key-8901"

    async def scenario() -> list[str | int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(door), base_url="http://engine") as client:
            same = await asyncio.gather(*(client.get(f"/metrics?{number}") for number in range(40)))
            assert [(await client.head("/metrics")).text, (await client.post("/metrics")).status_code] == ["", 405]
            others = [await client.get(f"/v1/loads?include={number}") for number in range(8)]
            others += await asyncio.gather(*(client.get(f"/v1/loads?include={number}") for number in range(8, 20)))
            others.append(await client.get("/health_generate"))  # a probe's place is no client's
            supervisor = {"Authorization": "Bearer supervisor-key-8901"}
            others.append(await client.get("/v1/loads?include=20", headers=supervisor))
            return [*{answer.text for answer in same}, *(answer.status_code for answer in others)]

    assert asyncio.run(scenario()) == ["1"] + [200] * 16 + [429] * 4 + [200, 404]  # 404: past `app`, to the engine


def test_ready_is_503_while_the_supervisor_wants_no_requests(tmp_path: Path) -> None:
    engine, unready = Engine(), tmp_path / "unready"
    engine.app.get("/ready")(engine.models)
    door = guarded(engine, KEYS)
    door._unready = unready
    assert ask(door, "GET", "/ready").status_code == 200
    unready.touch()
    assert ask(door, "GET", "/ready").status_code == 503
    assert ask(door, "GET", "/health").status_code == 200
    unready.unlink()
    assert ask(door, "GET", "/ready").status_code == 200


def test_callers_that_leave_keep_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computed, "_MOST_S", 0.0)  # nothing is reused
    go, counted = asyncio.Event(), 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal counted
        counted += 1
        await go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"well"})

    answers, scope = Computed(app), {"method": "GET", "headers": [], "query_string": b""}

    async def scenario() -> list[Any]:
        left = [asyncio.create_task(answers.answer("/health", scope, AsyncMock())) for _ in range(40)]
        await asyncio.sleep(0)
        for task in left:
            task.cancel()
        honest = {"GET": AsyncMock(), "HEAD": AsyncMock()}
        stays = asyncio.gather(*(answers.answer("/health", {**scope, "method": by}, to) for by, to in honest.items()))
        await asyncio.sleep(0)
        go.set()
        await stays
        return [call.args[0].get("body") for to in honest.values() for call in to.await_args_list]

    assert asyncio.run(scenario()) == [None, b"well", None, b""]
    assert counted == 1

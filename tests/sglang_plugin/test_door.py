"""The door in front of a small real application, reached as any ASGI server would reach it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse

from kimi_w4a8_eagle3.door_check import require_door
from kimi_w4a8_eagle3.door_settings import DoorSettings
from kimi_w4a8_eagle3.errors import KimiError
from kimi_w4a8_eagle3.server import free_port
from kimi_w4a8_eagle3.sglang_plugin import door as door_module
from kimi_w4a8_eagle3.sglang_plugin.door import Door
from kimi_w4a8_eagle3.sglang_plugin.door_requests import ModelLimits, RequestRules
from kimi_w4a8_eagle3.sglang_plugin.request_guard import check_numbers, check_prompt

CLIENT_KEY = "client-key-0123"
ADMIN_KEY = "admin-key-4567"
CONTEXT = 100
# A part of what SGLang reads; test_door_sglang.py holds the rules against the real lists.
KNOWN = {
    "/v1/chat/completions": frozenset(
        ["model", "messages", "n", "custom_logit_processor", "lora_path", "session_params"]
    ),
    "/v1/completions": frozenset(["model", "prompt", "n", "rid", "bootstrap_host"]),
    "/generate": frozenset(["text", "input_ids", "sampling_params", "http_worker_ipc", "return_hidden_states"]),
    "sampling_params": frozenset(["temperature", "n", "custom_params", "is_normalized"]),
}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


class Engine:
    """An application with SGLang's paths: it answers what it read, slowly where told, and counts."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.seen: list[Any] = []
        self.left = asyncio.Event()
        self.release = asyncio.Event()
        self.status = 200
        self.message = ""
        for path in ("/v1/chat/completions", "/v1/completions", "/generate", "/v1/messages", "/v1/responses"):
            self.app.post(path)(self.answer)
        self.app.get("/v1/models")(self.models)
        self.app.get("/health")(self.models)
        self.app.get("/server_info")(self.server_info)
        self.app.api_route("/flush_cache", methods=["GET", "POST"])(self.models)
        self.app.post("/slow")(self.stream)
        self.app.post("/v1/tokenize")(self.answer)

    async def answer(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.seen.append(body)
        if body.get("user") == "wait":
            await self.release.wait()
        if body.get("user") == "until I leave":
            while not await request.is_disconnected():
                await asyncio.sleep(0.001)
            self.left.set()
        if self.status != 200:
            return JSONResponse({"message": self.message}, self.status)
        return JSONResponse({"ok": True})

    async def models(self) -> dict[str, str]:
        return {"ok": "yes"}

    async def server_info(self) -> dict[str, Any]:
        return {"model_path": "weights", "served_model_name": "m", "tp_size": 8, "api_key": "secret", "host": "h"}

    async def stream(self) -> StreamingResponse:
        async def pieces() -> AsyncIterator[bytes]:
            for number in range(3):
                yield b"%d" % number

        return StreamingResponse(pieces())


Ask = Callable[..., httpx.Response]


def guarded(engine: Engine, settings: DoorSettings, host: str = "127.0.0.1", remote_media: bool = False) -> Door:
    rules = RequestRules(settings, KNOWN, ModelLimits(CONTEXT, remote_media))
    return Door(engine.app, settings=settings, admin_open=settings.admin_open(host), rules=rules, routes=engine.app)


def ask(door: Door, method: str, path: str, **request: Any) -> httpx.Response:
    async def one() -> httpx.Response:
        # Another address than the server's: requests of the engine to itself are let in.
        transport = httpx.ASGITransport(door, client=("192.0.2.7", 4711))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            return await client.request(method, path, **request)

    return asyncio.run(one())


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def message(response: httpx.Response) -> str:
    return str(response.json()["error"]["message"])


KEYS = DoorSettings(api_key=CLIENT_KEY, admin_key=ADMIN_KEY)
CLOSED = DoorSettings(policy="closed")


@pytest.mark.parametrize("path", ["/health", "/server_info"])
def test_probes_and_the_routers_questions_need_no_key(path: str) -> None:
    assert ask(guarded(Engine(), KEYS), "GET", path).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        (bearer("wrong-key-000"), 401),
        ({"Authorization": CLIENT_KEY}, 401),
        ({"Authorization": f"Basic {CLIENT_KEY}"}, 401),
        ({"Authorization": f"Bearer {CLIENT_KEY}x"}, 401),
        ({"Authorization": "Bearer \xe4\xf6\xfc".encode("latin-1")}, 401),
        (bearer(CLIENT_KEY), 200),
        ({"Authorization": f"bearer {CLIENT_KEY}"}, 200),
        ({"x-api-key": CLIENT_KEY}, 200),
        (bearer(ADMIN_KEY), 200),
    ],
    ids=["none", "wrong", "no-scheme", "basic", "longer", "not-ascii", "right", "lower-case", "anthropic", "admin"],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_clients_need_the_key(headers: dict[str, Any], status: int, path: str) -> None:
    engine = Engine()
    response = ask(guarded(engine, KEYS), "POST", path, json={**CHAT, "input": "x"}, headers=headers)
    assert response.status_code == status
    assert bool(engine.seen) == (status == 200)
    if status == 401:
        assert response.headers["www-authenticate"] == "Bearer"
        assert "Authorization: Bearer KEY" in message(response)
        assert CLIENT_KEY not in response.text


def test_a_path_that_nobody_serves_is_not_found_not_forbidden() -> None:
    assert ask(guarded(Engine(), KEYS), "GET", "/v1/chat/completion", headers=bearer(CLIENT_KEY)).status_code == 404
    assert ask(guarded(Engine(), KEYS), "GET", "/v1/chat/completion").status_code == 401


@pytest.mark.parametrize(
    ("settings", "host", "headers", "status"),
    [
        (DoorSettings(), "127.0.0.1", {}, 200),
        (DoorSettings(), "::1", {}, 200),
        (DoorSettings(), "0.0.0.0", {}, 403),
        (DoorSettings(policy="open"), "0.0.0.0", {}, 200),
        (DoorSettings(policy="open", api_key=CLIENT_KEY), "0.0.0.0", {}, 403),
        (DoorSettings(policy="open", api_key=CLIENT_KEY), "0.0.0.0", bearer(CLIENT_KEY), 200),
        (DoorSettings(policy="open", admin_key=ADMIN_KEY), "127.0.0.1", {}, 403),
        (CLOSED, "127.0.0.1", {}, 403),
        (DoorSettings(api_key=CLIENT_KEY), "127.0.0.1", bearer(CLIENT_KEY), 403),
        (DoorSettings(admin_key=ADMIN_KEY), "127.0.0.1", {}, 403),
        (KEYS, "127.0.0.1", bearer(CLIENT_KEY), 403),
        (KEYS, "127.0.0.1", bearer(ADMIN_KEY), 200),
        (DoorSettings(), "127.0.0.1", {"Origin": "https://example.org"}, 403),
        (DoorSettings(), "127.0.0.1", {"Sec-Fetch-Site": "cross-site"}, 403),
    ],
    ids=[
        "loopback",
        "loopback-6",
        "beyond",
        "open-beyond",
        "open-no-key",
        "open-client-key",
        "open-but-an-admin-key",
        "closed-loopback",
        "key-closes",
        "admin-key-closes",
        "client-key-is-not-enough",
        "admin-key",
        "web-page",
        "web-page-get",
    ],
)
def test_administrative_endpoints(settings: DoorSettings, host: str, headers: dict[str, str], status: int) -> None:
    response = ask(guarded(Engine(), settings, host), "POST", "/flush_cache", headers=headers)
    assert response.status_code == status
    if status == 403:
        assert "/flush_cache is for the operator" in message(response)


def test_the_settings_of_the_engine_are_for_the_operator() -> None:
    public = ask(guarded(Engine(), KEYS), "GET", "/server_info", headers=bearer(CLIENT_KEY))
    assert public.json() == {"model_path": "weights", "served_model_name": "m", "tp_size": 8}
    for door, headers in ((guarded(Engine(), KEYS), bearer(ADMIN_KEY)), (guarded(Engine(), DoorSettings()), {})):
        assert ask(door, "GET", "/server_info", headers=headers).json()["host"] == "h"


def test_a_websocket_needs_the_admin_key() -> None:
    async def connect(headers: list[tuple[bytes, bytes]]) -> list[str]:
        sent: list[str] = []

        async def receive() -> dict[str, Any]:
            return {"type": "websocket.connect"}

        async def send(event: Any) -> None:
            sent.append(event["type"])

        async def inner(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "websocket.accept"})

        door = Door(inner, settings=KEYS, admin_open=False, rules=None, routes=None)  # type: ignore[arg-type]
        await door({"type": "websocket", "path": "/v1/realtime", "headers": headers}, receive, send)
        return sent

    assert asyncio.run(connect([])) == ["websocket.close"]
    assert asyncio.run(connect([(b"authorization", b"Bearer " + ADMIN_KEY.encode())])) == ["websocket.accept"]


def test_a_body_that_is_too_large() -> None:
    engine = Engine()
    door = guarded(engine, DoorSettings(max_body_bytes=1000))
    big = {**CHAT, "user": "x" * 2000}

    async def lying(scope_headers: list[tuple[bytes, bytes]], chunks: list[bytes]) -> int:
        status: list[int] = []
        waiting = [{"type": "http.request", "body": each, "more_body": True} for each in chunks]
        waiting.append({"type": "http.request", "body": b"", "more_body": False})

        async def receive() -> dict[str, Any]:
            return waiting.pop(0)

        async def send(event: Any) -> None:
            status.extend([event["status"]] if "status" in event else [])

        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": scope_headers}
        await door({**scope, "client": ("192.0.2.7", 1), "server": ("192.0.2.8", 2)}, receive, send)
        return status[0]

    for response in (
        ask(door, "POST", "/v1/chat/completions", json=big),
        ask(door, "POST", "/v1/chat/completions", content=iter_bytes(json.dumps(big).encode())),
    ):
        assert response.status_code == 413
        assert "larger than 1000 bytes" in message(response)
    assert asyncio.run(lying([(b"content-length", b"10")], [b"x" * 900] * 2)) == 413
    assert asyncio.run(lying([(b"content-length", b"99999999999")], [b"{}"])) == 413
    assert asyncio.run(lying([(b"transfer-encoding", b"chunked")], [b"x" * 600] * 5)) == 413
    assert engine.seen == []
    assert ask(door, "POST", "/v1/chat/completions", json={**CHAT, "user": "x" * 500}).status_code == 200


async def iter_bytes(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 100):
        yield body[start : start + 100]


def test_more_requests_than_allowed_are_told_to_come_back() -> None:
    engine = Engine()
    door = guarded(engine, DoorSettings(max_concurrent=2))

    async def scenario() -> tuple[httpx.Response, httpx.Response, list[int]]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(door), base_url="http://engine") as client:
            waiting = [
                asyncio.create_task(client.post("/v1/chat/completions", json={**CHAT, "user": "wait"}))
                for _ in range(2)
            ]
            while len(engine.seen) < 2:
                await asyncio.sleep(0.001)
            third = await client.post("/v1/completions", json={"prompt": "x"})
            models = await client.get("/v1/models")
            assert models.status_code == 200
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

    async def scenario() -> None:
        events = [{"type": "http.request", "body": body, "more_body": False}, {"type": "http.disconnect"}]

        async def receive() -> dict[str, Any]:
            return events.pop(0) if len(events) > 1 else events[0]

        async def send(event: Any) -> None:
            return None

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
        more = {"query_string": b"", "client": ("192.0.2.7", 1), "server": ("192.0.2.8", 2), "root_path": ""}
        await asyncio.wait_for(door({**scope, **more}, receive, send), 10)
        assert engine.left.is_set()

    asyncio.run(scenario())
    assert ask(door, "POST", "/v1/chat/completions", json=CHAT).status_code == 200


def test_an_answer_passes_piece_by_piece() -> None:
    engine = Engine()
    sent: list[bytes] = []

    async def scenario() -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"{}", "more_body": False}

        async def send(event: Any) -> None:
            sent.append(event.get("body", b"start"))

        async def inner(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for piece in (b"a", b"b"):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                assert sent[-1] == piece  # nothing is held back
            await send({"type": "http.response.body", "body": b"c", "more_body": False})

        door = guarded(engine, DoorSettings())
        door._app = inner
        scope = {"type": "http", "method": "POST", "path": "/generate", "headers": []}
        await door(scope, receive, send)

    asyncio.run(scenario())
    assert sent == [b"start", b"a", b"b", b"c"]


def deep(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = {"a": [value]}
    return value


def image(url: Any) -> dict[str, Any]:
    return {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]}


REFUSED: dict[str, tuple[str, Any, str]] = {
    "no json": ("/v1/chat/completions", b"{bad", "not JSON"),
    "empty": ("/v1/chat/completions", b"", "not JSON"),
    "not utf-8": ("/v1/completions", b'{"prompt": "\xff"}', "not JSON"),
    "lone surrogate": ("/v1/completions", b'{"prompt": "\\ud800"}', "not JSON"),
    "nan": ("/v1/completions", b'{"prompt": "x", "temperature": NaN}', "not JSON"),
    "list": ("/v1/completions", b"[]", "not a JSON object"),
    "null": ("/generate", b"null", "not a JSON object"),
    "depth bomb": ("/v1/completions", b'{"prompt": ' + b"[" * 100000 + b"]" * 100000 + b"}", "not JSON"),
    "deep": ("/v1/chat/completions", {**CHAT, "response_format": deep(30)}, "nests more than 48"),
    "pickle": ("/v1/chat/completions", {**CHAT, "custom_logit_processor": "gASV"}, "custom_logit_processor is not for"),
    "adapter": ("/v1/chat/completions", {**CHAT, "lora_path": "/etc"}, "lora_path is not for"),
    "session": ("/v1/chat/completions", {**CHAT, "session_params": {"id": "x"}}, "session_params is not for"),
    "bootstrap": ("/v1/completions", {"prompt": "x", "bootstrap_host": "h"}, "bootstrap_host is not for"),
    "no ids": ("/v1/completions", {"prompt": "x", "rid": []}, "rid is not for"),
    "ipc": ("/generate", {"text": "x", "http_worker_ipc": "ipc:///x"}, "http_worker_ipc is not for"),
    "hidden states": ("/generate", {"text": "x", "return_hidden_states": True}, "return_hidden_states is not for"),
    "internal": ("/generate", {"text": "x", "sampling_params": {"is_normalized": True}}, "is_normalized is not for"),
    "n huge": ("/v1/chat/completions", {**CHAT, "n": 2**40}, "512 sequences"),
    "n zero": ("/v1/chat/completions", {**CHAT, "n": 0}, "n must be a whole number"),
    "n text": ("/v1/completions", {"prompt": "x", "n": "5"}, "n must be a whole number"),
    "batch times n": ("/v1/completions", {"prompt": ["x"] * 300, "n": 2}, "512 sequences"),
    "generate n": ("/generate", {"text": ["x"] * 300, "sampling_params": {"n": 2}}, "512 sequences"),
    "batch": ("/v1/completions", {"prompt": ["x"] * 513}, "at most 512"),
    "params without prompts": ("/generate", {"text": "x", "sampling_params": [{}, {}]}, "list of prompts"),
    "no params": ("/generate", {"text": ["x"], "sampling_params": []}, "list of prompts"),
    "long text": ("/v1/completions", {"prompt": "x" * 2000}, "longer than 100 tokens"),
    "long chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 2000}]}, "100 tokens"),
    "many ids": ("/v1/completions", {"prompt": [1] * 101}, "longer than 100 tokens"),
    "logprobs": ("/v1/completions", {"prompt": "x", "logprobs": 10**9}, "between 0 and 128"),
    "negative logprobs": ("/v1/chat/completions", {**CHAT, "top_logprobs": -1}, "between 0 and 128"),
    "generate logprobs": ("/generate", {"text": "x", "top_logprobs_num": 10**6}, "between 0 and 128"),
    "bias": ("/v1/completions", {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(5000)), 1)}, "at most 4096"),
    "grammar": ("/v1/completions", {"prompt": "x", "regex": "a" * 70000}, "regex is larger than"),
    "schema": ("/v1/chat/completions", {**CHAT, "response_format": {"x": "a" * 70000}}, "response_format is larger"),
    "template": (
        "/v1/chat/completions",
        {**CHAT, "chat_template_kwargs": {"messages": []}},
        "chat_template_kwargs may",
    ),
    "tokenize template": ("/v1/tokenize", {**CHAT, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs may"),
    "streamed tokens": ("/v1/tokenize", {"prompt": "x", "stream": True}, "not streamed"),
    "loopback image": ("/v1/chat/completions", image({"url": "http://127.0.0.1/x"}), "fetches no media"),
    "metadata image": ("/v1/chat/completions", image("http://169.254.169.254/x"), "fetches no media"),
    "file image": ("/v1/chat/completions", image({"url": "file:///etc/passwd"}), "fetches no media"),
    "path image": ("/v1/chat/completions", image({"url": "/etc/passwd"}), "fetches no media"),
    "generate image": ("/generate", {"text": "x", "image_data": ["/etc/passwd"]}, "fetches no media"),
    "audio": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "/x"}}]}]},
        "content of type 'input_audio'",
    ),
    "anthropic image": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}]},
        "fetches no media",
    ),
    "image in a tool's result": (
        "/v1/messages",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "content": [{"type": "image", "source": {"url": "http://x"}}]}],
                }
            ]
        },
        "fetches no media",
    ),
    "responses image": (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]},
        "fetches no media",
    ),
    "format is a list": ("/v1/chat/completions", {**CHAT, "response_format": [1]}, "response_format is an object"),
    "tools is a number": ("/v1/responses", {"input": "x", "tools": 19079}, "tools is a list of objects"),
    "a tool is a text": ("/v1/chat/completions", {**CHAT, "tools": ["f"]}, "tools is a list of objects"),
    "type of a tool": ("/v1/messages", {**CHAT, "tools": [{"type": 5}]}, "tools is a list of objects"),
    "responses tool": ("/v1/responses", {"input": "x", "tools": [{"type": "mcp", "server_url": "http://x"}]}, "tools"),
}


@pytest.mark.parametrize(("path", "body", "expected"), REFUSED.values(), ids=REFUSED.keys())
def test_bodies_that_the_engine_must_not_see(path: str, body: Any, expected: str) -> None:
    engine = Engine()
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = ask(guarded(engine, DoorSettings()), "POST", path, content=content)
    assert (response.status_code, expected in message(response)) == (400, True), response.text
    assert engine.seen == []
    if path == "/v1/messages":
        assert response.json()["type"] == "error"
    else:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


ACCEPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "unknown to SGLang": ("/v1/chat/completions", {**CHAT, "metadata": {"a": "b"}, "prediction": None}),
    "a whole form of nulls": ("/v1/completions", {"prompt": "x", "rid": None, "bootstrap_host": None, "n": None}),
    "false": ("/generate", {"text": "x", "return_hidden_states": False, "sampling_params": {"custom_params": None}}),
    "batch": ("/v1/completions", {"prompt": ["a"] * 256, "n": 2}),
    "ids": ("/generate", {"input_ids": [[1, 2], [3]], "sampling_params": [{"n": 1}, {"n": 1}]}),
    "image": ("/v1/chat/completions", image({"url": "data:image/png;base64," + "A" * 5000})),
    "template": ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"thinking": False}}),
    "tool call": (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f"}}]},
                {"role": "tool", "content": "see http://example.org/image.png"},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"url": {}}}}}],
        },
    ),
}


@pytest.mark.parametrize(("path", "body"), ACCEPTED.values(), ids=ACCEPTED.keys())
def test_what_clients_send_arrives_unchanged(path: str, body: dict[str, Any]) -> None:
    engine = Engine()
    response = ask(guarded(engine, CLOSED), "POST", path, json=body)
    assert (response.status_code, engine.seen) == (200, [body]), response.text


def test_remote_media_only_where_the_operator_listed_domains() -> None:
    door = guarded(Engine(), DoorSettings(), remote_media=True)  # SGLang then checks the domain, of redirects too
    assert ask(door, "POST", "/v1/chat/completions", json=image({"url": "https://example.org/x"})).status_code == 200
    assert ask(door, "POST", "/v1/chat/completions", json=image({"url": "file:///etc/passwd"})).status_code == 400


def test_compressed_bodies_are_refused() -> None:
    response = ask(
        guarded(Engine(), DoorSettings()), "POST", "/generate", json={}, headers={"x-body-compressed": "zstd"}
    )
    assert response.status_code == 415


def test_a_grammar_that_cannot_be_followed_is_the_clients_fault() -> None:
    engine = Engine()
    engine.status, engine.message = 500, "Grammar accept_token failed: Tokens not accepted: 0"
    response = ask(guarded(engine, DoorSettings()), "POST", "/v1/chat/completions", json=CHAT)
    assert (response.status_code, "grammar" in message(response)) == (400, True)
    engine.message = "CUDA error"
    response = ask(guarded(engine, DoorSettings()), "POST", "/v1/chat/completions", json=CHAT)
    assert (response.status_code, response.json()) == (500, {"message": "CUDA error"})


def test_a_root_path_does_not_open_a_side_door() -> None:
    engine = Engine()
    outer = FastAPI()
    outer.mount("/prefix", guarded(engine, KEYS))
    ask_outer: Any = outer
    assert ask(ask_outer, "POST", "/prefix/flush_cache", headers=bearer(CLIENT_KEY)).status_code == 403
    assert ask(ask_outer, "POST", "/prefix/v1/chat/completions", json=CHAT).status_code == 401


def test_the_engine_may_ask_itself_without_a_key_and_nobody_else() -> None:
    """SGLang warms up over HTTP, after it has started, and does not know the key."""
    config = uvicorn.Config(guarded(Engine(), KEYS), port=free_port(), log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    url = f"http://127.0.0.1:{config.port}"
    elsewhere = "import sys, httpx; print(httpx.post(sys.argv[1], json={'prompt': 'x'}).status_code)"
    try:
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 200
        assert httpx.post(f"{url}/flush_cache").status_code == 200
        assert httpx.get(f"{url}/flush_cache").status_code == 403  # what an engine fetches for a client is no warm-up
        done = subprocess.run(
            [sys.executable, "-c", elsewhere, f"{url}/v1/completions"], capture_output=True, text=True
        )
        assert done.stdout.strip() == "401", done.stderr
    finally:
        server.should_exit = True
        thread.join(timeout=10)


def test_a_preflight_reaches_the_application() -> None:
    engine = Engine()
    engine.app.add_api_route("/v1/models", lambda: PlainTextResponse("preflight"), methods=["OPTIONS"])
    assert ask(guarded(engine, KEYS), "OPTIONS", "/v1/models").text == "preflight"


def test_keys_show_nowhere() -> None:
    assert CLIENT_KEY not in repr(KEYS) + str(KEYS)
    assert ADMIN_KEY not in repr(KEYS) + str(KEYS)


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"KIMI_DOOR": "closed", "SGLANG_RUST_SERVER": "1"}, "SGLANG_RUST_SERVER serves HTTP from a program"),
        ({"KIMI_API_KEY_FILE": "/nowhere/key"}, "the key file cannot be read"),
        ({"KIMI_MAX_BODY_BYTES": "much"}, "KIMI_MAX_BODY_BYTES='much' is not allowed"),
    ],
    ids=["another-front-end", "no-key-file", "misspelt"],
)
def test_no_door_no_engine(environ: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=f"kimi: {reason}"):  # SGLang would catch an Exception and go on
        door_module.install(None)


def test_an_engine_without_a_door_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(app: Any) -> None:
        monkeypatch.setattr(httpx, "get", lambda url, timeout: ask(app, "GET", url.removeprefix("http://engine")))

    serve(guarded(Engine(), KEYS))
    require_door("http://engine", key_expected=True, closed_expected=True)
    serve(guarded(Engine(), DoorSettings()))
    require_door("http://engine", key_expected=False, closed_expected=False)
    for key, closed in ((True, False), (False, True)):
        with pytest.raises(KimiError, match="the engine has no door"):
            require_door("http://engine", key_expected=key, closed_expected=closed)


def test_the_request_guard_refuses_what_the_scheduler_cannot_take() -> None:
    check_prompt([0, 1, 99], vocabulary=100, max_tokens=3)
    for ids in ([], [-1], [100], [1] * 4):
        with pytest.raises(ValueError, match=r"prompt|token ids"):
            check_prompt(ids, vocabulary=100, max_tokens=3)
    check_numbers(None, 100)
    check_numbers({"top_k": 2**31 - 1, "stop_token_ids": [99], "stop_regex": ["a+"], "max_new_tokens": None}, 100)
    for bad in ({"top_k": 2**31}, {"max_new_tokens": 2**63}, {"stop_token_ids": [100]}, {"stop_regex": "("}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            check_numbers(bad, 100)

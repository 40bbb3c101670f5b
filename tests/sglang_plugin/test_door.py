"""The door in front of a small real application, reached as any ASGI server would reach it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse

from kimi_w4a8_eagle3.door.access import CHECKED
from kimi_w4a8_eagle3.door.check import require_door
from kimi_w4a8_eagle3.door.middleware import Door, InternalKey
from kimi_w4a8_eagle3.door.rules import ModelLimits, RequestModel, RequestRules
from kimi_w4a8_eagle3.door.settings import DoorSettings
from kimi_w4a8_eagle3.errors import KimiError
from kimi_w4a8_eagle3.server import free_port
from kimi_w4a8_eagle3.sglang_plugin.request_guard import check_numbers, check_prompt, check_prompt_logprobs

CLIENT_KEY = "client-key-0123"
ADMIN_KEY = "admin-key-4567"
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
# What the bodies hold is test_door_bodies.py's subject, with SGLang's own models.
ANYTHING = RequestModel(frozenset(), lambda body: None)


class Engine:
    """An application with SGLang's paths: it answers what it read, slowly where told, and counts."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.seen: list[Any] = []
        self.asked_by: list[tuple[str, str]] = []
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

    async def stream(self, request: Request) -> StreamingResponse:
        assert request.client is not None
        self.asked_by.append((request.client.host, request.url.scheme))

        async def pieces() -> AsyncIterator[bytes]:
            for number in range(3):
                yield b"%d" % number

        return StreamingResponse(pieces())


Ask = Callable[..., httpx.Response]


def guarded(
    engine: Engine, settings: DoorSettings, host: str = "127.0.0.1", internal: InternalKey | None = None
) -> Door:
    rules = RequestRules(settings, dict.fromkeys(CHECKED, ANYTHING), ANYTHING, ModelLimits(context=100))
    return Door(engine.app, settings=settings, host=host, rules=rules, routes=engine.app, internal=internal)


def ask(door: Door, method: str, path: str, **request: Any) -> httpx.Response:
    async def one() -> httpx.Response:
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
    response = ask(
        guarded(engine, KEYS),
        "POST",
        path,
        json=CHAT if path == "/v1/chat/completions" else {"input": "x"},
        headers=headers,
    )
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
        (DoorSettings(policy="open", api_key=CLIENT_KEY), "0.0.0.0", {}, 401),
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
    assert ask(guarded(Engine(), KEYS), "PATCH", "/server_info").json() == {"detail": "Method Not Allowed"}
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

        door = Door(inner, settings=KEYS, host="0.0.0.0", rules=None, routes=None)  # type: ignore[arg-type]
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


@pytest.mark.parametrize(
    ("settings", "host", "headers", "status"),
    [
        (DoorSettings(), "127.0.0.1", {}, 200),
        (DoorSettings(), "0.0.0.0", {}, 403),
        (DoorSettings(native="open"), "0.0.0.0", {}, 200),
        (DoorSettings(), "127.0.0.1", {"Origin": "https://example.org"}, 403),
        (DoorSettings(policy="closed"), "127.0.0.1", {}, 403),
        (DoorSettings(native="open", api_key=CLIENT_KEY), "0.0.0.0", {}, 401),
        (DoorSettings(native="open", api_key=CLIENT_KEY), "0.0.0.0", bearer(CLIENT_KEY), 200),
        (DoorSettings(native="keyless", policy="closed"), "127.0.0.1", {}, 200),
        (DoorSettings(native="keyless", api_key=CLIENT_KEY), "127.0.0.1", bearer(CLIENT_KEY), 403),
        (KEYS, "127.0.0.1", bearer(CLIENT_KEY), 403),
        (KEYS, "127.0.0.1", bearer(ADMIN_KEY), 200),
    ],
    ids=[
        "laptop",
        "beyond",
        "opened",
        "web-page",
        "closed-by-policy",
        "no-key",
        "opened-key",
        "keyless",
        "keyless-but-a-key",
        "client",
        "admin",
    ],
)
def test_sglangs_own_generate_is_for_the_operator(
    settings: DoorSettings, host: str, headers: dict[str, str], status: int
) -> None:
    response = ask(guarded(Engine(), settings, host), "POST", "/generate", json={"text": "x"}, headers=headers)
    assert response.status_code == status


def test_a_stranger_learns_nothing_before_the_key_is_asked_for() -> None:
    """No route is matched and no byte of the body is read: the wrong key costs the same everywhere."""

    async def receive() -> Any:
        raise AssertionError("the body was read")

    sent: list[Any] = []

    async def send(event: Any) -> None:
        sent.append(event)

    class Routes:
        @property
        def router(self) -> Any:
            raise AssertionError("routes were matched")

    door = guarded(Engine(), KEYS)
    door._routes = Routes()
    for path in ("/v1/chat/completions", "/generate", "/flush_cache", "/nowhere"):
        scope = {"type": "http", "method": "POST", "path": path, "headers": [(b"authorization", b"Bearer wrong")]}
        asyncio.run(door(scope, receive, send))
    assert [event["status"] for event in sent if "status" in event] == [401] * 4


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, InternalKey, Engine]]:
    """A door with both keys behind uvicorn as SGLang starts it, in the environment that the plugin leaves."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "")
    engine, internal = Engine(), InternalKey()
    config = uvicorn.Config(
        guarded(engine, KEYS, internal=internal), port=free_port(), log_level="error", lifespan="off"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{config.port}", internal, engine
    server.should_exit = True
    thread.join(timeout=10)


def test_no_address_opens_the_door(served: tuple[str, InternalKey, Engine]) -> None:
    """Neither this very process, nor one that says in a header that it is."""
    url, _, engine = served
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as held:
        itself = "{}:{}".format(*held.getsockname())
        for forwarded in ({}, {"X-Forwarded-For": itself}, {"X-Forwarded-For": "127.0.0.1", "Forwarded": "for=::1"}):
            for path in ("/v1/completions", "/generate", "/flush_cache"):
                assert httpx.post(url + path, json={"prompt": "x"}, headers=forwarded).status_code == 401
    assert engine.seen == []
    headers = {**bearer(CLIENT_KEY), "X-Forwarded-For": "203.0.113.9", "X-Forwarded-Proto": "https"}
    assert httpx.post(f"{url}/slow", headers={**headers, **bearer(ADMIN_KEY)}).status_code == 200
    assert engine.asked_by == [("127.0.0.1", "http")]


def test_the_engine_asks_itself_with_a_key_that_ends_with_its_warm_up(served: tuple[str, InternalKey, Engine]) -> None:
    url, internal, _ = served
    key = bearer(str(internal.value))
    assert httpx.post(f"{url}/generate", json={"text": "x"}, headers=key).status_code == 200
    assert httpx.post(f"{url}/flush_cache", headers=key).status_code == 200
    internal.expire()
    assert httpx.post(f"{url}/generate", json={"text": "x"}, headers=key).status_code == 401
    assert httpx.post(f"{url}/generate", json={"text": "x"}, headers=bearer("None")).status_code == 401


def test_a_preflight_reaches_the_application() -> None:
    engine = Engine()
    engine.app.add_api_route("/v1/models", lambda: PlainTextResponse("preflight"), methods=["OPTIONS"])
    assert ask(guarded(engine, KEYS), "OPTIONS", "/v1/models").text == "preflight"


def test_keys_show_nowhere() -> None:
    assert CLIENT_KEY not in repr(KEYS) + str(KEYS)
    assert ADMIN_KEY not in repr(KEYS) + str(KEYS)


def test_an_engine_without_a_door_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(app: Any) -> None:
        def get(url: str, headers: dict[str, str], timeout: float) -> httpx.Response:
            return ask(app, "GET", url.removeprefix("http://engine"), headers=headers)

        monkeypatch.setattr(httpx, "get", get)

    serve(guarded(Engine(), KEYS))
    require_door("http://engine", key_expected=True)
    serve(guarded(Engine(), DoorSettings()))
    require_door("http://engine", key_expected=False)
    with pytest.raises(KimiError, match="the engine has no door"):
        require_door("http://engine", key_expected=True)
    serve(Engine().app)
    with pytest.raises(KimiError, match="the engine has no door"):
        require_door("http://engine", key_expected=False)


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


def test_logprobs_of_a_prompt_are_bounded_by_their_product() -> None:
    check_prompt_logprobs(8180, None, 128, [1] * 4096)  # of the answer alone
    check_prompt_logprobs(8180, 0, 8, None)
    check_prompt_logprobs(8180, 8100, 128, None)
    for start, top, ids in ((0, 128, None), (0, 0, [1] * 100), (0, 5, [1] * 5)):
        with pytest.raises(ValueError, match="positions times candidates"):
            check_prompt_logprobs(8180, start, top, ids)

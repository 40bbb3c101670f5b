"""Access through the door depends on keys and on nothing else about a request."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from support.door_app import (
    ADMIN_KEY,
    CHAT,
    CLIENT_KEY,
    CLOSED,
    KEYS,
    Engine,
    ask,
    bearer,
    events_of,
    guarded,
    message,
    posted,
)

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.door.middleware import InternalKey
from kimi_w4a8_eagle3.door.presence import require_door
from kimi_w4a8_eagle3.door.settings import DoorSettings
from proof.load.asgi import served_app


@pytest.mark.parametrize("path", ["/health", "/server_info"])
def test_probes_and_the_routers_questions_need_no_key(path: str) -> None:
    assert ask(guarded(Engine(), KEYS), "GET", path).status_code == 200


CLIENTS = {
    "none": ({}, 401),
    "wrong": (bearer("wrong-key-000"), 401),
    "no-scheme": ({"Authorization": CLIENT_KEY}, 401),
    "basic": ({"Authorization": f"Basic {CLIENT_KEY}"}, 401),
    "longer": ({"Authorization": f"Bearer {CLIENT_KEY}x"}, 401),
    "not-ascii": ({"Authorization": "Bearer \xe4\xf6\xfc".encode("latin-1")}, 401),
    "right": (bearer(CLIENT_KEY), 200),
    "lower-case": ({"Authorization": f"bearer {CLIENT_KEY}"}, 200),
    "anthropic": ({"x-api-key": CLIENT_KEY}, 200),
    "admin": (bearer(ADMIN_KEY), 200),
}


@pytest.mark.parametrize(("headers", "status"), CLIENTS.values(), ids=CLIENTS)
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


def test_an_unknown_path_is_not_found_not_forbidden() -> None:
    assert ask(guarded(Engine(), KEYS), "GET", "/v1/chat/completion", headers=bearer(CLIENT_KEY)).status_code == 404
    assert ask(guarded(Engine(), KEYS), "GET", "/v1/chat/completion").status_code == 401


OPERATORS = {
    "loopback": (DoorSettings(), "127.0.0.1", {}, 200),
    "loopback-6": (DoorSettings(), "::1", {}, 200),
    "beyond": (DoorSettings(), "0.0.0.0", {}, 403),
    "open-beyond": (DoorSettings(policy="open"), "0.0.0.0", {}, 200),
    "open-no-key": (DoorSettings(policy="open", api_key=CLIENT_KEY), "0.0.0.0", {}, 401),
    "open-client-key": (DoorSettings(policy="open", api_key=CLIENT_KEY), "0.0.0.0", bearer(CLIENT_KEY), 200),
    "open-but-an-admin-key": (DoorSettings(policy="open", admin_key=ADMIN_KEY), "127.0.0.1", {}, 403),
    "closed-loopback": (CLOSED, "127.0.0.1", {}, 403),
    "key-closes": (DoorSettings(api_key=CLIENT_KEY), "127.0.0.1", bearer(CLIENT_KEY), 403),
    "admin-key-closes": (DoorSettings(admin_key=ADMIN_KEY), "127.0.0.1", {}, 403),
    "client-key-is-not-enough": (KEYS, "127.0.0.1", bearer(CLIENT_KEY), 403),
    "admin-key": (KEYS, "127.0.0.1", bearer(ADMIN_KEY), 200),
    "web-page": (DoorSettings(), "127.0.0.1", {"Origin": "https://example.org"}, 403),
    "web-page-get": (DoorSettings(), "127.0.0.1", {"Sec-Fetch-Site": "cross-site"}, 403),
    "through-a-proxy": (DoorSettings(), "127.0.0.1", {"X-Forwarded-For": "203.0.113.9"}, 403),
    "open-through-a-proxy": (DoorSettings(policy="open"), "127.0.0.1", {"X-Forwarded-For": "203.0.113.9"}, 200),
}


@pytest.mark.parametrize(("settings", "host", "headers", "status"), OPERATORS.values(), ids=OPERATORS)
def test_administrative_endpoints(settings: DoorSettings, host: str, headers: dict[str, str], status: int) -> None:
    response = ask(guarded(Engine(), settings, host), "POST", "/flush_cache", headers=headers)
    assert response.status_code == status
    if status == 403:
        assert ("no web pages" if "Origin" in headers else "/flush_cache is for the operator") in message(response)


def test_the_settings_of_the_engine_are_for_the_operator() -> None:
    """SGLang asks its schedulers for this answer, so callers without the key get one that the door has ready."""
    engine = Engine()
    assert ask(guarded(engine, KEYS), "PATCH", "/server_info").json() == {"detail": "Method Not Allowed"}
    public = ask(guarded(engine, KEYS), "GET", "/server_info", headers=bearer(CLIENT_KEY))
    assert public.json() == {"model_path": "weights"} and engine.seen == []
    for door, headers in ((guarded(Engine(), KEYS), bearer(ADMIN_KEY)), (guarded(Engine(), DoorSettings()), {})):
        assert ask(door, "GET", "/server_info", headers=headers).json()["host"] == "h"


@pytest.mark.parametrize(
    ("headers", "sent"),
    [([], "websocket.close"), ([(b"authorization", b"Bearer " + ADMIN_KEY.encode())], "websocket.accept")],
)
def test_a_websocket_needs_the_admin_key(headers: list[tuple[bytes, bytes]], sent: str) -> None:
    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})

    door = guarded(Engine(), KEYS, "0.0.0.0")
    door._app = inner
    scope = {"type": "websocket", "path": "/v1/realtime", "headers": headers}
    assert [event["type"] for event in events_of(door, scope, {"type": "websocket.connect"})] == [sent]


def test_a_root_path_does_not_open_a_side_door() -> None:
    engine = Engine()
    outer = FastAPI()
    outer.mount("/prefix", guarded(engine, KEYS))
    ask_outer: Any = outer
    assert ask(ask_outer, "POST", "/prefix/flush_cache", headers=bearer(CLIENT_KEY)).status_code == 403
    assert ask(ask_outer, "POST", "/prefix/v1/chat/completions", json=CHAT).status_code == 401


GENERATE = {
    "laptop": (DoorSettings(), "127.0.0.1", {}, 200),
    "beyond": (DoorSettings(), "0.0.0.0", {}, 403),
    "opened": (DoorSettings(native="open"), "0.0.0.0", {}, 200),
    "web-page": (DoorSettings(), "127.0.0.1", {"Origin": "https://example.org"}, 403),
    "closed-by-policy": (DoorSettings(policy="closed"), "127.0.0.1", {}, 403),
    "no-key": (DoorSettings(native="open", api_key=CLIENT_KEY), "0.0.0.0", {}, 401),
    "opened-key": (DoorSettings(native="open", api_key=CLIENT_KEY), "0.0.0.0", bearer(CLIENT_KEY), 200),
    "keyless": (DoorSettings(native="keyless", policy="closed"), "127.0.0.1", {}, 200),
    "keyless-but-a-key": (DoorSettings(native="keyless", api_key=CLIENT_KEY), "127.0.0.1", bearer(CLIENT_KEY), 403),
    "keyless-but-an-admin-key": (DoorSettings(native="keyless", admin_key=ADMIN_KEY), "127.0.0.1", {}, 403),
    "client": (KEYS, "127.0.0.1", bearer(CLIENT_KEY), 403),
    "admin": (KEYS, "127.0.0.1", bearer(ADMIN_KEY), 200),
}


@pytest.mark.parametrize(("settings", "host", "headers", "status"), GENERATE.values(), ids=GENERATE)
def test_sglangs_own_generate_is_for_the_operator(
    settings: DoorSettings, host: str, headers: dict[str, str], status: int
) -> None:
    response = ask(guarded(Engine(), settings, host), "POST", "/generate", json={"text": "x"}, headers=headers)
    assert response.status_code == status


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate", "/flush_cache", "/nowhere"])
def test_a_stranger_learns_nothing_before_the_key_is_asked_for(path: str) -> None:
    """A wrong key is refused before any route is matched or any byte of the body is read."""
    door = guarded(Engine(), KEYS)
    door._routes = None  # type: ignore[assignment]
    start, *_ = events_of(door, posted(path, (b"authorization", b"Bearer wrong")))  # there is no event to receive
    assert start["status"] == 401


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, InternalKey, Engine]]:
    """A door with both keys behind uvicorn as SGLang starts it, in the environment that the plugin leaves."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "")
    engine, internal = Engine(), InternalKey()
    with served_app(guarded(engine, KEYS, internal=internal)) as url:
        yield url, internal, engine


def test_no_address_opens_the_door(served: tuple[str, InternalKey, Engine]) -> None:
    """Neither a request from this machine nor one with a forged address header passes without a key."""
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


def test_keys_show_nowhere() -> None:
    assert CLIENT_KEY not in repr(KEYS) + str(KEYS)
    assert ADMIN_KEY not in repr(KEYS) + str(KEYS)


def test_an_engine_without_a_door_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(app: Any) -> None:
        def get(url: str, headers: dict[str, str], timeout: float, verify: ssl.SSLContext) -> httpx.Response:
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
    monkeypatch.undo()
    with pytest.raises(KimiError, match="the engine does not answer"):
        require_door("http://127.0.0.1:9", key_expected=False)


PAGES = {
    "of another site": ({"Origin": "https://example.org"}, 403),
    "of another port": ({"Origin": "http://127.0.0.1:8080"}, 403),
    "without an address": ({"Origin": "null"}, 403),
    "by another name": ({"Host": "rebound.example.org:30000"}, 403),
    "by no name": ({"Host": "["}, 403),
    "of its own": ({"Origin": "http://127.0.0.1:30000"}, 200),
    "by localhost": ({"Host": "localhost:30000"}, 200),
    "by ::1": ({"Host": "[::1]:30000"}, 200),
}


@pytest.mark.parametrize(("headers", "status"), PAGES.values(), ids=PAGES)
def test_web_pages_reach_nothing_on_loopback_without_a_key(headers: dict[str, str], status: int) -> None:
    for method, path in (("GET", "/v1/models"), ("GET", "/server_info"), ("OPTIONS", "/v1/chat/completions")):
        answered = ask(guarded(Engine(), DoorSettings()), method, path, headers=headers)
        assert answered.status_code == (405 if method == "OPTIONS" and status == 200 else status)
    posted = ask(guarded(Engine(), DoorSettings()), "POST", "/v1/chat/completions", json=CHAT, headers=headers)
    assert posted.status_code == status
    keyed = guarded(Engine(), KEYS)
    assert ask(keyed, "GET", "/v1/models", headers={**headers, **bearer(CLIENT_KEY)}).status_code == 200

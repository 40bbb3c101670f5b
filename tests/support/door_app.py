"""A small application with SGLang's paths and the door in front of it, reached as any ASGI server would reach it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, StreamingResponse

from kimi_w4a8_eagle3.door.access import CHECKED
from kimi_w4a8_eagle3.door.admission import Admission
from kimi_w4a8_eagle3.door.middleware import Door, InternalKey
from kimi_w4a8_eagle3.door.rules import RequestModel, RequestRules
from kimi_w4a8_eagle3.door.settings import DoorSettings
from kimi_w4a8_eagle3.door.shares import BODIES, Shares

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
        self.headers: list[str] = []  # of the last body that it read
        self.asked_by: list[tuple[str, str]] = []
        self.left = asyncio.Event()
        self.release = asyncio.Event()
        self.status, self.message = 200, ""
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
        self.headers = list(request.headers)
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
        self.seen.append("/server_info")
        return {"model_path": "weights", "api_key": "secret", "host": "h"}

    async def stream(self, request: Request) -> StreamingResponse:
        assert request.client is not None
        self.asked_by.append((request.client.host, request.url.scheme))

        async def pieces() -> AsyncIterator[bytes]:
            for number in range(3):
                yield b"%d" % number

        return StreamingResponse(pieces())


Ask = Callable[..., httpx.Response]


def guarded(
    engine: Engine,
    settings: DoorSettings,
    host: str = "127.0.0.1",
    internal: InternalKey | None = None,
    admission: Admission | None = None,
) -> Door:
    rules = RequestRules(settings, dict.fromkeys(CHECKED, ANYTHING), ANYTHING, context=100)
    shares = Shares(BODIES * settings.max_body_bytes)
    named: Any = {"settings": settings, "host": host, "rules": rules, "admission": admission, "shares": shares}
    return Door(engine.app, **named, routes=engine.app, public_info={"model_path": "weights"}, internal=internal)


def ask(door: Door, method: str, path: str, **request: Any) -> httpx.Response:
    async def one() -> httpx.Response:
        transport = httpx.ASGITransport(door, client=("192.0.2.7", 4711))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:30000") as client:
            return await client.request(method, path, **request)

    return asyncio.run(one())


def events_of(app: Any, scope: dict[str, Any], *received: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what an ASGI application sends that receives these events; the last one repeats."""
    waiting, sent = list(received), list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        return waiting.pop(0) if len(waiting) > 1 else waiting[0]

    async def send(event: Any) -> None:
        sent.append(event)

    peers = {"client": ("192.0.2.7", 1), "server": ("192.0.2.8", 2), "query_string": b"", "root_path": ""}
    asyncio.run(asyncio.wait_for(app({**peers, **scope}, receive, send), 10))
    return sent


def posted(path: str, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    """Return the ASGI scope of a POST."""
    return {"type": "http", "method": "POST", "path": path, "headers": list(headers)}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def message(response: httpx.Response) -> str:
    return str(response.json()["error"]["message"])


KEYS = DoorSettings(api_key=CLIENT_KEY, admin_key=ADMIN_KEY)
CLOSED = DoorSettings(policy="closed")

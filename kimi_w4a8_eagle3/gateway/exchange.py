"""One request and its answer over HTTP: who asks, the body, an answer or a stream with signs of life, and leaving."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, MutableMapping
from contextlib import aclosing, suppress
from typing import Any

import orjson

from . import metrics
from .endpoints import ENDPOINTS, Endpoint, vendor_of
from .errors import Refusal
from .keys import Client, Keys
from .limits import Running
from .service import Service, Work

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

BODY_S = 30.0  # for a whole body
SILENCE_S = 10.0  # of a stream before a sign of life
GRACE_S = 1.0  # of a stream before its headers: a refusal that comes faster keeps its status
HALF_CLOSED_S = 1.0  # of a client that may have left before the answer is begun, which tells
THREAD_BYTES = 2**13  # a larger body, which may take 40 ms and more, is read in a thread, beside the event loop
_JSON = (b"content-type", b"application/json")
_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_ORIGIN = (b"access-control-allow-origin", b"*")
_PREFLIGHT = [
    _ORIGIN,
    (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
    (b"access-control-allow-headers", b"*"),
]


class Gone(Exception):
    """The client left."""


class Exchange:
    """One request. ready: raises Refusal unless new requests may come."""

    def __init__(
        self, service: Service | None, keys: Keys, running: Running, ready: Callable[..., None], max_body_bytes: int,
        scope: Scope, receive: Receive, send: Send,
    ) -> None:  # fmt: skip
        self._service, self._keys, self._running, self._ready = service, keys, running, ready
        self._max_body = max_body_bytes
        self._scope, self._receive, self._send = scope, receive, send
        self._path: str = scope["path"].removeprefix(scope.get("root_path", ""))
        self._begun = self._ended = False  # headers, or the last byte, were sent
        self._opening, self._wrote_s = asyncio.Lock(), 0.0
        self._request_id = f"req_{id(self):x}{time.monotonic_ns():x}".encode()

    async def serve(self) -> None:
        """Answer the request, or its refusal."""
        status = 200
        try:
            await self._answer()
        except Gone:
            status = 499
        except Refusal as refusal:
            status = refusal.status
            with suppress(Gone):
                await self._refuse(refusal)
        except Exception:
            status = 500
            with suppress(Gone):
                await self._refuse(Refusal("the gateway failed on this request", status=500))
            raise
        finally:
            known = self._path if self._path in ENDPOINTS else "other"
            metrics.REQUESTS.labels(known, str(status)).inc()

    async def _answer(self) -> None:
        headers: dict[bytes, bytes] = dict(self._scope["headers"])
        method = self._scope["method"]
        if method == "OPTIONS":  # a browser's preflight has no key and reaches nothing
            await self._respond(204, b"", _PREFLIGHT)
            return
        endpoint = self._endpoint()
        client = Client() if endpoint is not None and endpoint.who == "everyone" else self._keys.admit(headers)
        if endpoint is None:
            raise Refusal(f"this server has no {self._path[:200]}", status=404)
        if method not in endpoint.methods:
            raise Refusal(f"{endpoint.path} is asked with {endpoint.methods[0]}", status=405)
        if endpoint.body is None:
            await self._fixed(endpoint)
            return
        self._ready()
        assert self._service is not None
        if b"content-encoding" in headers:
            raise Refusal("compressed bodies are not supported", status=415)
        work = await self._work(self._service, endpoint, headers, client)
        if work.whole is not None:
            await self._respond(200, orjson.dumps(work.whole))
            return
        with self._running.place(client.name, work.candidates if work.streamed else 0):
            await self._while_here(self._generate(endpoint, work, client))

    def _endpoint(self) -> Endpoint | None:
        if self._path.startswith("/v1/models/"):
            return ENDPOINTS["/v1/models"]
        return ENDPOINTS.get(self._path)

    async def _fixed(self, endpoint: Endpoint) -> None:
        if endpoint.path == "/":
            await self._respond(200, b'{"server":"kimi-w4a8-eagle3"}')
            return
        if endpoint.path in ("/health", "/ready"):
            self._ready(probed=True)
            await self._respond(200, b'{"status":"ready"}')
            return
        self._ready()
        assert self._service is not None
        if endpoint.path == "/metrics":
            await self._respond(200, await self._service.metrics(), content_type=b"text/plain; charset=utf-8")
            return
        if endpoint.path == "/server_info":
            await self._respond(200, orjson.dumps(self._service.info()))
            return
        models = self._service.models()
        name = self._path.removeprefix("/v1/models").removeprefix("/")
        if name and name != models["data"][0]["id"]:
            raise Refusal(f"The model {name[:200]!r} does not exist", 404, "model", "model_not_found")
        await self._respond(200, orjson.dumps(models["data"][0] if name else models))

    async def _work(self, service: Service, endpoint: Endpoint, headers: Mapping[bytes, bytes], client: Client) -> Work:
        """Return what the body asks for."""
        with self._running.unread(client.name) as count:
            raw = await self._body(headers, count)
            async with self._running.turn(client.name):
                if len(raw) > THREAD_BYTES:
                    return await asyncio.to_thread(service.read, endpoint, raw)
                return service.read(endpoint, raw)

    async def _body(self, headers: Mapping[bytes, bytes], count: Callable[[int], None]) -> bytes:
        claimed = headers.get(b"content-length", b"0")
        if claimed.isdigit() and int(claimed[:19]) > self._max_body:
            raise self._too_large()
        try:
            return await asyncio.wait_for(self._read(count), BODY_S)
        except asyncio.TimeoutError:
            raise Refusal(f"the body did not arrive within {BODY_S:.0f} s", status=408) from None

    async def _read(self, count: Callable[[int], None]) -> bytes:
        chunks, arrived = list[bytes](), 0
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                raise Gone
            chunk = message.get("body", b"")
            arrived += len(chunk)
            if arrived > self._max_body:
                raise self._too_large()
            count(len(chunk))
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)

    def _too_large(self) -> Refusal:
        return Refusal(f"the request is larger than {self._max_body} bytes", status=413)

    async def _while_here(self, work: Coroutine[Any, Any, None]) -> None:
        """Run until the end, or until the client leaves; what the engine does for it is aborted then."""
        working, watching = asyncio.ensure_future(work), asyncio.ensure_future(self._watch())
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not (working.done() or self._ended):
                raise Gone
            await working
        finally:
            for task in (working, watching):
                task.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    async def _watch(self) -> None:
        """Return when the client has left. An empty message says that it sends no more, but may still read."""
        while (await self._receive())["type"] != "http.disconnect":
            await asyncio.sleep(HALF_CLOSED_S)
            if not self._begun:
                await self._start(200, [_JSON])
                await self._write(b" ")  # white space of JSON; a client that has left resets the connection

    async def _generate(self, endpoint: Endpoint, work: Work, client: Client) -> None:
        assert self._service is not None
        await self._service.check(work)
        if work.whole is not None:
            await self._respond(200, orjson.dumps(work.whole))
            return
        assert work.writer is not None
        async with aclosing(self._service.events(work, client)) as events:
            if work.streamed:
                await self._stream(endpoint, work, events)
                return
            async for _ in events:
                pass
        await self._respond(200, orjson.dumps(work.writer.whole()))

    async def _stream(self, endpoint: Endpoint, work: Work, events: AsyncGenerator[bytes, None]) -> None:
        """Send events as they come, with signs of life between them."""
        assert work.writer is not None
        first = work.writer.begin()  # before what is numbered after it
        signs = asyncio.ensure_future(self._signs(first, endpoint.ping))
        try:
            opened = False
            async for event in events:
                if not opened:
                    await self._open(first)
                    opened = True
                if event:
                    await self._write(event)
            await self._open(first)
            await self._write(work.writer.finish(), more=False)
        except Refusal as refusal:
            if not self._begun:
                raise
            code = refusal.code if refusal.status < 500 else "server_error"
            failed = work.writer.failed(refusal.body(endpoint.vendor), refusal.message, code)
            await self._write(failed, more=False)
        finally:
            signs.cancel()
            await asyncio.gather(signs, return_exceptions=True)

    async def _open(self, first: bytes) -> None:
        async with self._opening:
            if not self._begun:
                await self._start(200, _STREAM)
                await self._write(first)

    async def _signs(self, first: bytes, ping: bytes) -> None:
        """Open a stream whose first token takes long, and write a sign of life after each silence."""
        await asyncio.sleep(GRACE_S)
        await self._open(first)
        while True:
            silent_s = time.monotonic() - self._wrote_s
            if silent_s >= SILENCE_S:
                await self._write(ping)
            await asyncio.sleep(SILENCE_S - silent_s if silent_s < SILENCE_S else SILENCE_S)

    async def _refuse(self, refusal: Refusal) -> None:
        body, headers = refusal.body(vendor_of(self._path)), refusal.headers()
        if self._begun:  # a half-closed client, which is told by the answer's text alone
            await self._write(body, more=False)
            return
        await self._respond(refusal.status, body, headers)

    async def _respond(
        self, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None,
        content_type: bytes = b"application/json",
    ) -> None:  # fmt: skip
        if self._begun:
            await self._write(body, more=False)
            return
        length = (b"content-length", str(len(body)).encode())
        kind = [(b"content-type", content_type)] if body else []
        await self._start(status, [*kind, length, *(headers or ())])
        await self._write(b"" if self._scope["method"] == "HEAD" else body, more=False)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._begun = True
        own = [(b"x-request-id", self._request_id), (b"request-id", self._request_id)]
        origin = [] if _ORIGIN in headers else [_ORIGIN]
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *own, *origin]})

    async def _write(self, body: bytes, more: bool = True) -> None:
        self._wrote_s, self._ended = time.monotonic(), not more
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

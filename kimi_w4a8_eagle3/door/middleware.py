"""The door in front of an engine's HTTP application: keys, closed endpoints, limits, and checks of bodies.

It is pure ASGI, so that SGLang still sees a client disconnect; SGLang's own key middleware is pure ASGI for the same
reason. The key is checked first, before a route is matched or a byte of the body is read. Nothing depends on the
address that a request comes from. `rules.py` defines what a body may contain.
"""

from __future__ import annotations

import hmac
import secrets
import sys
from collections.abc import Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.responses import JSONResponse

from .access import CHECKED, COMPUTED, GENERATING, SERVER_INFO, Access, classify, serves
from .admission import Admission
from .alive import WITH_SIGNS, WaitingClient
from .answers import App, Receive, Refusal, Scope, Send, answer, with_vendors_errors
from .bodies import BodyReader
from .computed import Computed
from .large import SWITCH_S, THREAD_BYTES, THREADS, WORKER_BYTES, WORKER_OBJECTS, in_thread, large_request
from .rules import Admitted, RequestRules
from .settings import DoorSettings, is_loopback
from .shares import ANSWER_S, KEPT, Places, Shares, Take, current_client


def describe(settings: DoorSettings, host: str) -> str:
    """Return one line for the log of an engine bound to `host`, without keys."""
    return "; ".join(
        (
            "clients need a key" if settings.api_key else "clients need no key",
            "administrative endpoints are open"
            if settings.admin_open(host)
            else "administrative endpoints need the admin key"
            if settings.admin_key
            else "administrative endpoints are closed",
            f"/generate is {'open' if settings.native_open else 'for the operator'}",
            f"bodies up to {settings.max_body_bytes} bytes",
            f"{settings.max_concurrent or 'any number of'} requests at a time",
        )
    )


_OVERRIDES = b"x-override-"
_BROWSER, _PROXY = {b"origin", b"sec-fetch-site"}, {b"forwarded", b"via", b"x-forwarded-for", b"x-real-ip"}


class InternalKey:
    """Random key of the engine's requests to itself while it warms up; void afterwards."""

    def __init__(self) -> None:
        self.value: str | None = secrets.token_urlsafe(32)

    def expire(self) -> None:
        """Make the key void."""
        self.value = None


class Door:
    """ASGI middleware: answers 4xx with a message to what must not reach the engine, and passes on checked requests.

    host: the address that the engine is bound to; loopback without any key is open (settings.DoorSettings). admission:
    the workers that check large bodies and pictures. shares: of the clients in memory and time. routes: the application
    whose routes tell an unlisted endpoint from an unknown path. public_info: what /server_info answers to callers other
    than the operator, for whom SGLang would ask its schedulers. internal: None without a warm-up. supervisor: the
    operator's key of the process that watches this engine; None without one. unready: a file that exists while that
    process wants this engine to get no requests.
    """

    def __init__(
        self,
        app: App,
        *,
        settings: DoorSettings,
        host: str,
        rules: RequestRules,
        admission: Admission,
        shares: Shares,
        routes: Any,
        public_info: Mapping[str, Any],
        internal: InternalKey | None = None,
        supervisor: str | None = None,
        unready: Path | None = None,
    ) -> None:
        self._app, self._settings = app, settings
        self._admin_open = settings.admin_open(host)
        self._keyless = settings.api_key is None and settings.admin_key is None and is_loopback(host)
        self._rules, self._admission, self._routes, self._internal = rules, admission, routes, internal
        self._supervisor, self._unready = supervisor, unready
        self._public_info = JSONResponse(public_info)
        self._bodies = BodyReader(settings.max_body_bytes, shares.waiting)
        self._computed = Computed(app)
        self._shares, self._in_loop, self._in_thread = shares, Places(1, shares), Places(THREADS, shares, KEPT)
        self._running = 0
        sys.setswitchinterval(SWITCH_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection of the ASGI server."""
        if scope["type"] == "http":
            try:
                with self._shares.holding() as take:
                    await self._request(scope, receive, send, take)
            except Refusal as refusal:
                await answer(scope, send, refusal)
        elif scope["type"] == "websocket" and not self._is_admin(dict(scope["headers"])):
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "for the operator"})  # becomes HTTP 403
        else:
            await self._app(scope, receive, send)

    async def _request(self, scope: Scope, receive: Receive, send: Send, take: Take) -> None:
        headers = dict[bytes, bytes](scope["headers"])
        if self._keyless:
            _refuse_web_pages(headers)
        if scope["method"] == "OPTIONS":  # a browser's preflight has no key and reaches no endpoint
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        self._admit(path, headers, scope)
        if path in SERVER_INFO and scope["method"] == "GET" and not self._may_administer(headers):
            await self._public_info(scope, receive, send)
            return
        if path == "/ready" and self._unready is not None and self._unready.exists():
            raise Refusal("this engine takes no requests now", status=503)
        if path in COMPUTED and not self._is_admin(headers):  # the operator waits for no client
            await self._computed.answer(path, scope, send)
            return
        wrapped = partial(with_vendors_errors, scope)
        if path not in CHECKED or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, wrapped(send) if path.startswith("/v1/") else send)
            return
        current_client.set(self._accounts(headers, scope))
        raw = await self._bodies.read(headers, receive, take)
        if raw is None:
            return  # the client disconnected
        body, pictures, _, streams = await self._admitted(path, headers, raw)
        del raw
        if pictures:
            await self._admission.require("pictures", [source for _, source in pictures], pictures[0][0])
        scope = {**scope, "headers": _with_length(scope["headers"], len(body))}
        client = WaitingClient(path if streams and path in WITH_SIGNS else None, body, partial(self._counted, send))
        if path not in GENERATING:
            await client.serve(self._app, scope, receive, wrapped)
            return
        limit = self._settings.max_concurrent
        if limit is not None and self._running >= limit:
            raise Refusal(f"this server is already working on {limit} requests; try again", status=429)
        self._running += 1
        try:
            await client.serve(self._app, scope, receive, wrapped)
        finally:
            self._running -= 1

    async def _counted(self, send: Send, message: MutableMapping[str, Any]) -> None:
        """Charge the client for its answer: tokens, choices, tool calls and logprobs."""
        self._shares.charge(current_client.get(), len(message.get("body", b"")) * ANSWER_S)
        await send(message)

    def _accounts(self, headers: Mapping[bytes, bytes], scope: Scope) -> tuple[str, ...]:
        """Return the key that the client sent, if clients need one, and its connection."""
        key = ("the admin key" if self._is_admin(headers) else "the client key",) if self._settings.api_key else ()
        return (*key, str(scope.get("client")))

    async def _admitted(self, path: str, headers: Mapping[bytes, bytes], raw: bytes) -> Admitted:
        large_request.set(self._in_thread if len(raw) > THREAD_BYTES else None)
        if len(raw) <= WORKER_BYTES and raw.count(b"{") <= WORKER_OBJECTS:
            async with self._in_loop.place():
                return self._rules.admit(path, headers, raw)
        await self._admission.require("reading", b"%b\n%b" % (path.encode(), raw), None)
        return await in_thread(self._in_thread, partial(self._rules.admit, path, headers, raw, typed=True))

    def _admit(self, path: str, headers: Mapping[bytes, bytes], scope: Scope) -> None:
        """Raise Refusal when a caller with these headers may not use `path`."""
        access = classify(path)
        if access is Access.PUBLIC:
            return
        client_key = self._settings.api_key
        if client_key and not (_sent(headers, client_key) or self._is_admin(headers)):
            given = b"authorization" in headers or b"x-api-key" in headers
            what = "this is not a key of this server" if given else "this server needs a key"
            raise Refusal(f"{what}; send it as `Authorization: Bearer KEY`", status=401)
        if (
            access is Access.CLIENT
            or (access is Access.NATIVE and self._settings.native_open)
            or self._may_administer(headers)
        ):
            return
        if access is Access.ADMIN and not serves(self._routes, dict(scope)):
            return  # a client's typo: SGLang answers 404
        remedy = "send the admin key" if self._settings.admin_key else "the server was started without an admin key"
        raise Refusal(f"{path} is for the operator of this server; {remedy}", status=403)

    def _may_administer(self, headers: Mapping[bytes, bytes]) -> bool:
        """Accept the admin key, or an open door and no browser or proxy: both bring strangers' requests to loopback."""
        if self._is_admin(headers):
            return True
        outside = _BROWSER | _PROXY if self._settings.policy == "auto" else _BROWSER
        client_key = self._settings.api_key
        return self._admin_open and not outside & headers.keys() and (client_key is None or _sent(headers, client_key))

    def _is_admin(self, headers: Mapping[bytes, bytes]) -> bool:
        keys = (self._settings.admin_key, self._internal and self._internal.value, self._supervisor)
        return any(_sent(headers, key) for key in keys if key)


def _refuse_web_pages(headers: Mapping[bytes, bytes]) -> None:
    """Refuse what a browser sends for a page of another site: this server has no key that the page would lack.

    By DNS rebinding a page reaches loopback under its own name, and then only the Host header tells.
    """
    host = headers.get(b"host", b"").decode("latin-1")
    origin = headers.get(b"origin", b"").decode("latin-1")
    if (host and not is_loopback(_hostname(f"//{host}"))) or (origin and origin.partition("//")[2] != host):
        raise Refusal(
            "without a key this server answers programs of its own machine, under a loopback address or localhost, and "
            "no web pages; start it with KIMI_API_KEY_FILE",
            status=403,
        )


def _hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _with_length(headers: Any, length: int) -> list[tuple[bytes, bytes]]:
    """Return the headers for a rewritten body, with its own length.

    Headers by which SGLang sets fields that a body may not set are removed: request id, priority, routing.
    """
    kept = [
        (name, value)
        for name, value in headers
        if name not in (b"content-length", b"transfer-encoding") and not name.startswith(_OVERRIDES)
    ]
    return [*kept, (b"content-length", str(length).encode())]


def _sent(headers: Mapping[bytes, bytes], key: str) -> bool:
    """Return True when the request carries `key` as OpenAI's or Anthropic's clients send it; in constant time."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    sent = token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
    return hmac.compare_digest(sent, key.encode())

"""The door in front of an engine's HTTP application: keys, closed endpoints, limits, and bodies that make no sense.

Pure ASGI, so that SGLang still sees a client leave (its own middleware for keys does the same, and for the same
reason). Requests are read and checked on their way in; answers pass through untouched. docs/door.md lists what is
open and what was found when SGLang 0.5.23 was given bad input.
"""

from __future__ import annotations

import hmac
import json
import logging
import multiprocessing
import os
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import psutil

from ..door_settings import DoorSettings, read_door
from ..errors import KimiError
from . import request_guard
from .door_access import CHECKED, GENERATING, SERVER_INFO, Access, classify, serves
from .door_requests import ModelLimits, Refusal, RequestRules, sglang_fields

logger = logging.getLogger(__name__)

TARGET = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_RETRY_AFTER_S = 1
# What anybody may know of /server_info: sglang-router asks for it without a key when a worker is registered.
_PUBLIC_INFO = (
    "model_path",
    "served_model_name",
    "tokenizer_path",
    "tp_size",
    "dp_size",
    "version",
    "speculative_algorithm",
    "speculative_num_draft_tokens",
)
_GRAMMAR_FAULT = b"Grammar accept_token failed"
_ERROR_TYPES = {  # as OpenAI and Anthropic name them
    401: "authentication_error",
    403: "permission_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def install(registry: Any) -> None:
    """Register the door and the request guard; an engine that cannot have a door which was asked for does not start."""
    if multiprocessing.parent_process() is not None:
        return  # a scheduler or detokenizer: it serves no HTTP, and should not import what does
    try:
        settings = read_door(os.environ)
    except KimiError as error:
        _stop(str(error))
    module, _, function = TARGET.rpartition(".")
    if os.environ.get("SGLANG_RUST_SERVER", "").lower() in ("1", "true", "yes"):
        _cannot_guard(settings, "SGLANG_RUST_SERVER serves HTTP from a program that the door cannot reach")
    elif not _defines(module, function):
        _cannot_guard(settings, f"this SGLang release has no {TARGET}")
    else:
        from sglang.srt.plugins.hook_registry import HookType

        registry.register(TARGET, guard_http_server, HookType.AROUND)
        registry.register(request_guard.TARGET, request_guard.validate_one_request, HookType.AROUND)


def _cannot_guard(settings: DoorSettings, why: str) -> None:
    if settings.must_hold:
        _stop(f"{why}; KIMI_DOOR, a key or KIMI_MAX_CONCURRENT_REQUESTS asks for a door, so nothing is served")
    logger.warning("door: not installed: %s", why)


def _stop(why: str) -> NoReturn:
    """End the process: SGLang logs an Exception of a plugin and goes on without the plugin, the door wide open."""
    raise SystemExit(f"kimi: {why}")


def _defines(module: str, function: str) -> bool:
    """True when the module's source defines the function; without importing it, which takes seconds."""
    found = find_spec(module)
    return bool(found and found.origin and f"def {function}(" in Path(found.origin).read_text())


def guard_http_server(
    original: Callable[..., Any], server_args: Any, tokenizer_manager: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND hook of `TARGET`: puts the door in front of the application just before it is served."""
    from sglang.srt.entrypoints import http_server

    settings = read_door(os.environ)
    if (workers := getattr(server_args, "tokenizer_worker_num", 1)) != 1:
        # Each of several workers imports the application anew, in a process where this hook never runs.
        _cannot_guard(
            settings, f"--tokenizer-worker-num {workers} serves HTTP from processes that the door cannot reach"
        )
    elif getattr(server_args, "grpc_port", None) is not None:
        _cannot_guard(settings, "--grpc-port opens a second door that this one does not guard")
    elif not hasattr(type(tokenizer_manager)._validate_one_request, "__wrapped__"):
        _cannot_guard(settings, f"this SGLang release has no {request_guard.TARGET}")
    else:
        admin_open = settings.admin_open(server_args.host)
        limits = ModelLimits(tokenizer_manager.context_len, bool(getattr(server_args, "allowed_media_domains", ())))
        rules = RequestRules(settings, sglang_fields(), limits)
        app = http_server.app
        app.add_middleware(Door, settings=settings, admin_open=admin_open, rules=rules, routes=app)
        logger.info("door: %s", describe(settings, admin_open))
    return original(server_args, tokenizer_manager, *args, **kwargs)


def describe(settings: DoorSettings, admin_open: bool) -> str:
    """One line for the log, without keys."""
    limits = (
        f"bodies up to {settings.max_body_bytes} bytes",
        f"{settings.max_concurrent or 'any number of'} requests at a time",
    )
    return "; ".join(
        (
            "clients need a key" if settings.api_key else "clients need no key",
            "administrative endpoints are open"
            if admin_open
            else "administrative endpoints need the admin key"
            if settings.admin_key
            else "administrative endpoints are closed",
            *limits,
        )
    )


class Door:
    """ASGI middleware: refuses what must not reach the engine with 4xx and a message, passes the rest on untouched.

    admin_open: endpoints that are not for clients need no admin key. routes: the application whose routes tell an
    unlisted endpoint from a path that does not exist.
    """

    def __init__(self, app: App, *, settings: DoorSettings, admin_open: bool, rules: RequestRules, routes: Any) -> None:
        self._app = app
        self._settings = settings
        self._admin_open = admin_open
        self._rules = rules
        self._routes = routes
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection of the ASGI server."""
        if scope["type"] == "http":
            try:
                await self._request(scope, receive, send)
            except Refusal as refusal:
                await _answer(scope, send, refusal)
        elif scope["type"] == "websocket" and not self._is_admin(_headers(scope)):
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "for the operator"})  # becomes HTTP 403
        else:
            await self._app(scope, receive, send)

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        headers = _headers(scope)
        access = classify(path, lambda: serves(self._routes, dict(scope)))
        if scope["method"] == "OPTIONS":  # a browser's preflight carries no key and reaches no endpoint
            await self._app(scope, receive, send)
            return
        try:
            self._require_key(access, path, headers)
        except Refusal:
            if not _from_this_process(scope):
                raise
        if path in SERVER_INFO and not self._may_administer(headers):
            send = _only(_PUBLIC_INFO, send)
        if path not in CHECKED or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        body = await self._body(headers, receive)
        if body is None:
            return  # the client left
        self._rules.check(path, headers, body)
        if path not in GENERATING:
            await self._app(scope, _replay(body, receive), send)
            return
        limit = self._settings.max_concurrent
        if limit is not None and self._running >= limit:
            raise Refusal(f"this server works on {limit} requests already; try again", status=429)
        self._running += 1
        try:
            await self._app(scope, _replay(body, receive), _without_grammar_faults(scope, send))
        finally:
            self._running -= 1

    def _require_key(self, access: Access, path: str, headers: Mapping[bytes, bytes]) -> None:
        if access is Access.PUBLIC:
            return
        if access is Access.ADMIN:
            if self._may_administer(headers):
                return
            remedy = "send the admin key" if self._settings.admin_key else "the server was started without an admin key"
            raise Refusal(f"{path} is for the operator of this server; {remedy}", status=403)
        if self._settings.api_key and not (_sent(headers, self._settings.api_key) or self._is_admin(headers)):
            given = b"authorization" in headers or b"x-api-key" in headers
            what = "this is not a key of this server" if given else "this server needs a key"
            raise Refusal(f"{what}; send it as `Authorization: Bearer KEY`", status=401)

    def _may_administer(self, headers: Mapping[bytes, bytes]) -> bool:
        """The admin key, or an open door and no browser: any web page can make a browser send requests to loopback."""
        if self._is_admin(headers):
            return True
        from_browser = b"origin" in headers or b"sec-fetch-site" in headers
        client_key = self._settings.api_key
        return self._admin_open and not from_browser and (client_key is None or _sent(headers, client_key))

    def _is_admin(self, headers: Mapping[bytes, bytes]) -> bool:
        return self._settings.admin_key is not None and _sent(headers, self._settings.admin_key)

    async def _body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes | None:
        """The whole body, or None when the client left before its end; whatever length it claims, the limit holds."""
        limit = self._settings.max_body_bytes
        too_large = Refusal(f"the request is larger than {limit} bytes", status=413)
        claimed = headers.get(b"content-length", b"0")
        if claimed.isdigit() and int(claimed) > 2 * limit:
            raise too_large
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            chunk = message.get("body", b"")
            size += len(chunk)
            if size <= limit:
                chunks.append(chunk)
            elif size > 2 * limit:  # up to here the rest was read and dropped: most clients read after they have sent
                raise too_large
            if not message.get("more_body", False):
                break
        if size > limit:
            raise too_large
        return b"".join(chunks)


def _from_this_process(scope: Scope) -> bool:
    """True for the engine's requests to itself: it warms up over HTTP, without a key, when it has started.

    The other end of such a connection is a socket of this very process, which nobody else can pretend. POST alone:
    what the engine might be made to fetch for a client, an image for one, it fetches with GET.
    """
    client, server = scope.get("client"), scope.get("server")
    if scope["method"] != "POST" or not client or not server or client[0] != server[0]:
        return False
    try:
        mine = psutil.Process().net_connections("tcp")
    except psutil.Error:
        return False
    return any(tuple(each.laddr) == tuple(client) and each.raddr[1:2] == (server[1],) for each in mine)


def _headers(scope: Scope) -> dict[bytes, bytes]:
    return dict(scope["headers"])


def _sent(headers: Mapping[bytes, bytes], key: str) -> bool:
    """True when the request carries `key`, as OpenAI's clients send it or as Anthropic's do; in constant time."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    sent = token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
    return hmac.compare_digest(sent, key.encode())


def _replay(body: bytes, receive: Receive) -> Receive:
    """`receive` with the body first, which was read already; then whatever comes, the client's leaving above all."""
    pending = True

    async def replayed() -> MutableMapping[str, Any]:
        nonlocal pending
        if pending:
            pending = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replayed


def _only(names: tuple[str, ...], send: Send) -> Send:
    """`send` that lets through these members of a JSON object alone."""
    start: MutableMapping[str, Any] = {}
    chunks: list[bytes] = []

    async def filtered(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
            return
        chunks.append(message.get("body", b""))
        if message.get("more_body", False):
            return
        try:
            answer = json.loads(b"".join(chunks))
            body = json.dumps({name: answer[name] for name in names if name in answer}).encode()
        except (ValueError, TypeError):
            body = b"{}"
        kept = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
        await send({**start, "headers": [*kept, (b"content-length", str(len(body)).encode())]})
        await send({"type": "http.response.body", "body": body})

    return filtered


def _without_grammar_faults(scope: Scope, send: Send) -> Send:
    """`send` that turns SGLang's 500 for a grammar which no token can follow into 400: the client wrote the grammar.

    Whether it can be followed shows only when it runs. Answers of any other status pass message by message.
    """
    held: list[MutableMapping[str, Any]] = []

    async def watched(message: MutableMapping[str, Any]) -> None:
        if not held and message.get("status") != 500:
            await send(message)
            return
        held.append(message)
        if message["type"] == "http.response.start" or message.get("more_body", False):
            return
        messages, body = list(held), b"".join(each.get("body", b"") for each in held)
        held.clear()
        if _GRAMMAR_FAULT in body:
            await _answer(scope, send, Refusal("no token of this model can follow the grammar of this request"))
            return
        for each in messages:
            await send(each)

    return watched


async def _answer(scope: Scope, send: Send, refusal: Refusal) -> None:
    """The refusal in the form that the endpoint's clients read: OpenAI's, or Anthropic's for /v1/messages."""
    kind = _ERROR_TYPES.get(refusal.status, "invalid_request_error")
    error = {"message": refusal.message, "type": kind}
    if scope["path"].removeprefix(scope.get("root_path", "")).startswith("/v1/messages"):
        content: dict[str, Any] = {"type": "error", "error": error}
    else:
        code = HTTPStatus(refusal.status).phrase.lower().replace(" ", "_")
        content = {"error": {**error, "param": refusal.param, "code": code}}
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if refusal.status == 429:
        headers.append((b"retry-after", str(_RETRY_AFTER_S).encode()))
    if refusal.status == 413:
        headers.append((b"connection", b"close"))  # the rest of the body is not worth reading
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

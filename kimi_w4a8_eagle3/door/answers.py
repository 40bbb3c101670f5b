"""The door's own answers, and the form of errors."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

from ..gateway.errors import CONTEXT_EXCEEDED as CONTEXT_EXCEEDED
from ..gateway.errors import Refusal as Refusal

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_RETRY_AFTER_S = 1
_FAILED_EVENT = b'data: {"error"'
_GRAMMAR_FAULT = b"Grammar accept_token failed"
# The messages of `request_guard`, which are Anthropic's.
OVERFLOW = re.compile(
    r"prompt is too long: \d+ tokens > \d+ maximum"
    r"|input length and `max_tokens` exceed context limit: \d+ \+ \d+ > \d+"
)
_ERROR_TYPES = {  # as OpenAI and Anthropic name them
    401: "authentication_error",
    403: "permission_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_ANTHROPIC = {404: "not_found_error", 500: "api_error"}  # where the two differ


async def answer(scope: Scope, send: Send, refusal: Refusal) -> None:
    """Send the refusal in the form that the endpoint's clients read."""
    body = _content(scope, refusal)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if refusal.status == 429:
        headers.append((b"retry-after", str(_RETRY_AFTER_S).encode()))
    if refusal.status in (408, 413, 503):
        headers.append((b"connection", b"close"))  # do not read the rest of the body
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _content(scope: Scope, refusal: Refusal) -> bytes:
    """Return the error in OpenAI's form, or in Anthropic's for /v1/messages."""
    kind = _ERROR_TYPES.get(refusal.status, "server_error" if refusal.status >= 500 else "invalid_request_error")
    error = {"message": refusal.message, "type": kind}
    if scope["path"].removeprefix(scope.get("root_path", "")).startswith("/v1/messages"):
        error["type"] = _ANTHROPIC.get(refusal.status, kind)
        return json.dumps({"type": "error", "error": error}).encode()
    return json.dumps({"error": {**error, "param": refusal.param, "code": refusal.code}}).encode()


def with_vendors_errors(scope: Scope, send: Send) -> Send:
    """Wrap `send` to give SGLang's errors, also those in streams, the form of the endpoint's vendor.

    Other answers pass message by message.
    A grammar that no token can follow is the client's fault: SGLang answers 500, because only decoding shows it.
    """
    status = 0
    body = b""

    async def translated(message: MutableMapping[str, Any]) -> None:
        nonlocal status, body
        status = message.get("status", status)
        if status < HTTPStatus.BAD_REQUEST:
            event = message.get("body", b"")
            if event.startswith(_FAILED_EVENT):
                code = json.loads(event[6:])["error"].get("code")
                refusal = _refusal(code if isinstance(code, int) else 500, event[6:])
                message = {**message, "body": b"data: %b\n\n" % _content(scope, refusal)}
            await send(message)
            return
        body += message.get("body", b"")
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            await answer(scope, send, _refusal(status, body))

    return translated


def _refusal(status: int, body: bytes) -> Refusal:
    """Read an error in any of SGLang's forms: flat, in `error`, FastAPI's `detail`, or text."""
    text = body.decode(errors="replace")
    if overflow := OVERFLOW.search(text):
        return Refusal(overflow[0], code=CONTEXT_EXCEEDED)
    if _GRAMMAR_FAULT in body:
        return Refusal("no token of this model can follow the grammar of this request")
    try:
        given = json.loads(text)
    except ValueError:
        given = text
    error = given.get("error", given) if isinstance(given, dict) else {"message": given}
    error = error if isinstance(error, dict) else {"message": error}
    param = error.get("param")
    unknown = "model_not_found" if status == HTTPStatus.NOT_FOUND and param == "model" else None
    return Refusal(str(error.get("message") or error.get("detail") or text), status, param, unknown)

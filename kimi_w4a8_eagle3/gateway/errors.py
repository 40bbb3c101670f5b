"""Refusals, and errors in the form that each vendor's clients read."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Literal

import orjson

Vendor = Literal["openai", "anthropic"]

RETRY_AFTER_S = 1
CONTEXT_EXCEEDED = "context_length_exceeded"  # OpenAI's code, by which clients know that they must shorten the prompt
_CODES = {status.value: status.phrase.lower().replace(" ", "_") for status in HTTPStatus}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_ANTHROPIC_TYPES = {404: "not_found_error", 500: "api_error"}  # where the two vendors differ


class Refusal(Exception):
    """A request that is answered with `status` and a message.

    param: the field that is wrong. code: OpenAI's name of the error. details: Anthropic's `error.details`.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.details = message, status, param, details
        self.code = code or _CODES.get(status, "error")

    def error(self, vendor: Vendor) -> dict[str, Any]:
        """Return the error object, as the vendor's SDK reads it."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        if vendor == "anthropic":
            more = {"details": self.details} if self.details else {}
            return {"type": _ANTHROPIC_TYPES.get(self.status, kind), "message": self.message, **more}
        return {"message": self.message, "type": kind, "param": self.param, "code": self.code}

    def body(self, vendor: Vendor) -> bytes:
        """Return the JSON body of the answer, which is also the data of an error event."""
        error = self.error(vendor)
        return orjson.dumps({"type": "error", "error": error} if vendor == "anthropic" else {"error": error})

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that the status needs."""
        match self.status:
            case 401:
                return [(b"www-authenticate", b"Bearer")]
            case 408 | 413:
                return [(b"connection", b"close")]  # the rest of the body is not read
            case 429 | 503:
                return [(b"retry-after", str(RETRY_AFTER_S).encode())]
        return []


def too_long(tokens: int, most: int) -> Refusal:
    """Return the refusal of a prompt without room, in Anthropic's words, on which Claude Code compacts."""
    return Refusal(f"prompt is too long: {tokens} tokens > {most} maximum", code=CONTEXT_EXCEEDED)


def no_room(tokens: int, answer: int, most: int) -> Refusal:
    """Return the refusal of an answer that does not fit behind its prompt."""
    why = f"input length and `max_tokens` exceed context limit: {tokens} + {answer} > {most}"
    return Refusal(why, code=CONTEXT_EXCEEDED, param="max_tokens")

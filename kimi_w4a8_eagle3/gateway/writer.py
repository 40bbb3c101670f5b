"""What the writers of all APIs share: who answers, and the tokens of logprobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from .generate import Delta, TokenLogprob


class Writer(Protocol):
    """Writes one request's answers: events while they come, and the whole at the end; `id` is what clients see."""

    id: str

    def begin(self) -> bytes:
        """Return the events of a stream before the first token."""

    def delta(self, delta: Delta) -> bytes:
        """Return the events of what is new."""

    def finish(self) -> bytes:
        """Return the events that end a stream."""

    def whole(self) -> dict[str, Any]:
        """Return the answer, once all deltas were written."""

    def failed(self, body: bytes, message: str, code: str) -> bytes:
        """Return the events that end a stream with an error, whose JSON is `body`."""


@dataclass(frozen=True)
class Answerer:
    """Facts of the server in every answer. token_bytes: the bytes of a token."""

    model: str
    token_bytes: Callable[[int], bytes]

    def logprob(self, drawn: TokenLogprob) -> dict[str, Any]:
        """Return a token's logprob in OpenAI's form; a part of a character has its own bytes."""
        top = [self._candidate(token, value) for token, value in drawn.top]
        return {**self._candidate(drawn.token, drawn.logprob), "top_logprobs": top}

    def _candidate(self, token: int, logprob: float) -> dict[str, Any]:
        data = self.token_bytes(token)
        return {"token": data.decode(errors="replace"), "bytes": list(data), "logprob": logprob}


def sse(payload: dict[str, Any]) -> bytes:
    """Return an event without a name."""
    return b"data: %b\n\n" % orjson.dumps(payload)


def named(payload: dict[str, Any]) -> bytes:
    """Return an event with the name of its type."""
    return b"event: %b\ndata: %b\n\n" % (payload["type"].encode(), orjson.dumps(payload))

"""One request of a load, and what its client saw: the answer, an error, or, never to be accepted, a wrong answer."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Any

import httpx

from kimi_w4a8_eagle3.engine.client import bearer

from .load_questions import Question

_CHAT = "/v1/chat/completions"
_OVERSIZED_BYTES = 40 << 20  # the gateway and smg take 32 MiB


class Manner(str, Enum):
    """Behaviour of a client."""

    STREAM = "stream"
    PLAIN = "plain"  # the answer in one piece
    SLOW = "slow"  # reads one piece a second, through a small receive buffer
    LEAVES_STREAM = "leaves-stream"  # closes the connection after a few pieces
    LEAVES_PLAIN = "leaves-plain"  # closes the connection while it waits
    BAD = "bad"  # sends what must be refused


class ClientOutcome(str, Enum):
    """Result that one client saw."""

    OK = "ok"  # the very answer that was expected
    LEFT = "left"  # the client went away, as it was told to
    REFUSED = "refused"  # 4xx or 503
    FAILED = "failed"  # another 5xx
    UNREACHABLE = "unreachable"  # no connection
    CUT = "cut"  # the connection broke, or an error came, before the answer was whole
    HUNG = "hung"  # silence
    TRUNCATED = "truncated"  # part of the answer, and it looks whole
    WRONG = "wrong"  # another answer


FORBIDDEN = frozenset({ClientOutcome.TRUNCATED, ClientOutcome.WRONG})


@dataclass
class Record:
    """One request. Times are Unix seconds. pieces: when the parts of its answer came. tokens: the server's count."""

    manner: Manner
    question: int
    began: float
    ended: float = 0.0
    outcome: ClientOutcome = ClientOutcome.OK
    detail: str = ""
    status: int | None = None
    tokens: int | None = None
    request_id: str | None = None
    pieces: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first piece of a streamed answer."""
        return self.pieces[0] - self.began if self.pieces and self.manner is Manner.STREAM else None

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first, of a streamed answer."""
        if self.manner is not Manner.STREAM or len(self.pieces) < 2 or self.tokens is None or self.tokens < 2:
            return None
        return (self.pieces[-1] - self.pieces[0]) / (self.tokens - 1)


@dataclass
class _Received:
    """Parts of an answer that have arrived."""

    pieces: list[tuple[float, str]] = field(default_factory=list)
    finish_reason: str | None = None
    tokens: int | None = None
    done: bool = False  # `data: [DONE]`, or the whole body of an answer in one piece
    after_done: bool = False
    error: str = ""

    @property
    def text(self) -> str:
        return "".join(piece for _, piece in self.pieces)

    def take_event(self, line: str) -> None:
        """One line of a streamed answer."""
        if not line.startswith("data: "):
            return
        self.after_done |= self.done
        if line == "data: [DONE]":
            self.done = True
            return
        event = json.loads(line[len("data: ") :])
        if "error" in event:
            self.error = json.dumps(event["error"])[:300]
            return
        for choice in event.get("choices") or ():
            if piece := choice["delta"].get("content"):
                self.pieces.append((time.time(), piece))
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if usage := event.get("usage"):
            self.tokens = usage["completion_tokens"]

    def take_body(self, body: dict[str, Any]) -> None:
        """An answer in one piece."""
        choice = body["choices"][0]
        self.pieces.append((time.time(), choice["message"]["content"] or ""))
        self.finish_reason, self.tokens, self.done = choice["finish_reason"], body["usage"]["completion_tokens"], True


class LoadClient:
    """Asks one server or smg; used as an async context manager.

    hang_s: silence that counts as a hang. leave_after: pieces, or for an answer in one piece tenths of a second, after
    which a client that leaves does so. slow_s: between two pieces that a slow client reads.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        hang_s: float = 60.0,
        leave_after: int = 5,
        slow_s: float = 1.0,
    ) -> None:
        self._leave_after, self._slow_s = leave_after, slow_s
        timeout = httpx.Timeout(hang_s, connect=10.0)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        headers = bearer(api_key)
        self._http = httpx.AsyncClient(base_url=base_url, timeout=timeout, limits=limits, headers=headers)
        small = httpx.AsyncHTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)], limits=limits)
        self._slow = httpx.AsyncClient(base_url=base_url, timeout=timeout, transport=small, headers=headers)

    async def __aenter__(self) -> LoadClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()
        await self._slow.aclose()

    async def ask(self, question: Question, manner: Manner, number: int = 0) -> Record:
        """One request. number: which of the bad bodies a client of that manner sends."""
        record = Record(manner, number, time.time())
        received = _Received()
        try:
            if manner is Manner.BAD:
                await self._bad(question, number, record)
            elif manner in (Manner.PLAIN, Manner.LEAVES_PLAIN):
                await self._whole(question, manner, record, received)
            else:
                await self._streamed(question, manner, record, received)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            _end(record, ClientOutcome.UNREACHABLE, error)
        except httpx.TimeoutException as error:
            _end(record, ClientOutcome.HUNG, error)
        except httpx.HTTPError as error:
            _end(record, ClientOutcome.CUT, error)
        except (ValueError, LookupError, TypeError, AttributeError) as error:  # 200, but not what OpenAI's clients read
            _end(record, ClientOutcome.WRONG, error)
        record.ended = time.time()
        record.tokens, record.pieces = received.tokens, [at for at, _ in received.pieces]
        return record

    async def _whole(self, question: Question, manner: Manner, record: Record, received: _Received) -> None:
        patience = self._leave_after / 10 if manner is Manner.LEAVES_PLAIN else None
        try:
            response = await asyncio.wait_for(self._http.post(_CHAT, json=question.body(stream=False)), patience)
        except asyncio.TimeoutError:
            record.outcome = ClientOutcome.LEFT
            return
        if _refuses(response, response.text, record):
            return
        received.take_body(response.json())
        record.outcome, record.detail = _judge(question, received)

    async def _streamed(self, question: Question, manner: Manner, record: Record, received: _Received) -> None:
        http = self._slow if manner is Manner.SLOW else self._http
        async with http.stream("POST", _CHAT, json=question.body(stream=True)) as response:
            if response.status_code != 200:
                await response.aread()
                _refuses(response, response.text, record)
                return
            record.status, record.request_id = 200, response.headers.get("x-request-id")
            async for line in response.aiter_lines():
                received.take_event(line)
                if manner is Manner.LEAVES_STREAM and len(received.pieces) >= self._leave_after:
                    record.outcome = ClientOutcome.LEFT
                    return
                if manner is Manner.SLOW and line:
                    await asyncio.sleep(self._slow_s)
        record.outcome, record.detail = _judge(question, received)

    async def _bad(self, question: Question, number: int, record: Record) -> None:
        """A request that must be refused with a message; to be answered, or refused without one, is wrong."""
        bodies = bad_bodies(question)
        content = bodies[number % len(bodies)]
        headers = {**self._http.headers, "Content-Type": "application/json"}
        if oversized := len(content) >= _OVERSIZED_BYTES:
            # The server closes in the middle of it, and asyncio would lose the answer that came before the reset.
            url = self._http.base_url.join(_CHAT)
            response = await asyncio.to_thread(httpx.post, url, content=content, headers=headers, timeout=60.0)
        else:
            response = await self._http.post(_CHAT, content=content, headers=headers)
        if not _refuses(response, response.text, record):
            record.outcome, record.detail = ClientOutcome.WRONG, f"answered: {content[:120]!r}"
        elif oversized and record.status != 413:
            record.outcome = ClientOutcome.WRONG
        elif not record.detail:
            record.outcome, record.detail = ClientOutcome.WRONG, f"HTTP {response.status_code} without a message"


def bad_bodies(question: Question) -> Sequence[bytes]:
    """Bodies that every server must refuse."""
    body = question.body(stream=False)
    changed: tuple[dict[str, Any], ...] = (
        {"model": "no-such-model"},
        {"messages": []},
        {"messages": "not a list"},
        {"temperature": -5},
        {"max_tokens": -3},
        {"max_tokens": 10**9},
        {"top_p": 17},
    )
    return (b'{"model": "broken', b"[]", *(json.dumps(body | change).encode() for change in changed), _oversized())


@cache
def _oversized() -> bytes:
    return b'{"messages": "' + bytes(_OVERSIZED_BYTES)


def _refuses(response: httpx.Response, text: str, record: Record) -> bool:
    """Note an HTTP error; False for 200."""
    record.status, record.request_id = response.status_code, response.headers.get("x-request-id")
    if response.status_code == 200:
        return False
    refused = response.status_code < 500 or response.status_code == 503
    record.outcome, record.detail = ClientOutcome.REFUSED if refused else ClientOutcome.FAILED, text[:300]
    return True


def _judge(question: Question, received: _Received) -> tuple[ClientOutcome, str]:
    """Judge an answer that ended without a broken connection."""
    if received.error:
        return ClientOutcome.CUT, received.error
    if received.finish_reason is None or not received.done:
        missing = "finish_reason" if received.finish_reason is None else "[DONE]"
        return ClientOutcome.TRUNCATED, f"the stream ended without {missing} after {len(received.text)} characters"
    if received.finish_reason not in ("stop", "length"):
        return ClientOutcome.CUT, f"finish_reason {received.finish_reason!r}"
    if received.after_done:
        return ClientOutcome.WRONG, "data after [DONE]"
    expected = question.answer
    if expected is None:
        if received.tokens != question.max_tokens or received.finish_reason != "length":
            return ClientOutcome.TRUNCATED, f"{received.tokens} of {question.max_tokens} tokens"
        return ClientOutcome.OK, ""
    if received.text != expected.text:
        cut = expected.text.startswith(received.text)
        return (
            ClientOutcome.TRUNCATED if cut else ClientOutcome.WRONG,
            f"{received.text!r} instead of {expected.text!r}",
        )
    if (received.tokens, received.finish_reason) != (expected.tokens, expected.finish_reason):
        found = f"{received.tokens} tokens, {received.finish_reason}"
        return ClientOutcome.WRONG, f"{found} instead of {expected.tokens}, {expected.finish_reason}"
    return ClientOutcome.OK, ""


def _end(record: Record, outcome: ClientOutcome, error: Exception) -> None:
    record.outcome, record.detail = outcome, f"{type(error).__name__}: {error}"[:300]

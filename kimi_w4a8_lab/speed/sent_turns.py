"""Sender of recorded turns, in the load generator's process: when a turn is sent, its text, and its times.

Content of a prompt whose text was not recorded is made up: the same segment gives the same tokens of the model's own
tokenizer, so the server's prefix cache finds what the recording's server found.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Protocol

import httpx

from kimi_w4a8_eagle3.base.http import trusted
from kimi_w4a8_eagle3.engine.reply import EventReader

_WORDS = 4096
_TIMEOUT_S = 6 * 3600.0
CHAT = "/v1/chat/completions"
ROLE = "recorded"  # of the only message of a turn in the generator's file


@dataclass(frozen=True)
class Recorded:
    """One turn as the sender reads it; times in seconds of the replay.

    session, turn: its place. last: True in a session's last turn. parent: session of which this one is a subagent.
    start_s: of a first turn, after the replay's start or the parent's. wait_s: after the previous answer. kept: leading
    segments of the previous prompt that this one repeats. new: content and tokens of the others. path, body: a
    recorded request, sent as it is instead of a prompt.
    """

    session: int
    turn: int
    last: bool
    output_tokens: int
    parent: int | None = None
    start_s: float = 0.0
    wait_s: float = 0.0
    kept: int = 0
    new: Sequence[tuple[str, int]] = ()
    path: str = ""
    body: dict[str, Any] = field(default_factory=dict)


class Tokenizer(Protocol):
    def __len__(self) -> int: ...
    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...
    def decode(self, ids: list[int]) -> str: ...


@dataclass
class Sent:
    """One answered or failed turn; times in seconds, sent_s after the replay's start."""

    session: int
    turn: int
    sent_s: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    gaps: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    def times(self) -> dict[str, Any]:
        """Return what a reader of the run needs of this request, without its text."""
        counts = {"prompt_tokens": self.prompt_tokens, "cached_tokens": self.cached_tokens}
        counts |= {"output_tokens": self.output_tokens, "session": self.session, "turn": self.turn}
        ended = self.sent_s + self.latency
        return {**counts, "sent_s": self.sent_s, "ttft_s": self.ttft, "ended_s": ended, "error": self.error}


class TextMaker:
    """Makes text of a given number of tokens from the content of a segment."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.text = lru_cache(maxsize=2**16)(self._text)

    @cached_property
    def _words(self) -> list[str]:
        """Words of one token each, with the blank before them, so that joined words are encoded one by one."""
        found: list[str] = []
        for token in range(len(self._tokenizer)):
            word = self._tokenizer.decode([token])
            plain = word[:1] == " " and word[1:].isascii() and word[1:].isalpha() and len(word) > 2
            if plain and self._tokenizer.encode(word, add_special_tokens=False) == [token]:
                found.append(word)
                if len(found) == _WORDS:
                    break
        return found

    def _text(self, content: str, tokens: int) -> str:
        return "".join(random.Random(content).choices(self._words, k=tokens))


class Sender:
    """Sends the turns of all sessions at their times. A session waits for a free user, a subagent for its parent."""

    def __init__(self, base_url: str, model: str, users: int, headers: Mapping[str, str], texts: TextMaker) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=users)
        self._http = httpx.AsyncClient(
            base_url=base_url, headers=dict(headers), timeout=_TIMEOUT_S, limits=limits, verify=trusted()
        )
        self._model, self._texts, self._users = model, texts, asyncio.Semaphore(users)
        self.start = time.perf_counter()
        self._began: dict[int, asyncio.Future[float]] = {}

    async def send(self, turns: Sequence[Recorded]) -> Sent:
        """Send the last of a session's turns so far; failures are in the result."""
        recorded = turns[-1]
        if recorded.turn == 0:
            await self._begin(recorded)
        await asyncio.sleep(recorded.wait_s)
        sent = Sent(recorded.session, recorded.turn, time.perf_counter() - self.start)
        try:
            await self._answer(*self._request(turns), sent)
        except (httpx.HTTPError, ValueError, KeyError) as error:
            sent.error = f"{type(error).__name__}: {error}"
        finally:
            sent.latency = time.perf_counter() - self.start - sent.sent_s
            if recorded.last and recorded.parent is None:
                self._users.release()
        return sent

    async def _begin(self, recorded: Recorded) -> None:
        began = self.start
        if recorded.parent is None:
            await self._users.acquire()
        else:
            began = await self._beginning(recorded.parent)
        await asyncio.sleep(began + recorded.start_s - time.perf_counter())
        self._beginning(recorded.session).set_result(time.perf_counter())

    def _beginning(self, session: int) -> asyncio.Future[float]:
        return self._began.setdefault(session, asyncio.get_running_loop().create_future())

    def _request(self, turns: Sequence[Recorded]) -> tuple[str, dict[str, Any]]:
        """Return path and body of the last turn."""
        recorded = turns[-1]
        body = {**recorded.body, "model": self._model, "stream": True}
        if not recorded.body:
            segments: list[tuple[str, int]] = []
            for turn in turns:
                segments = [*segments[: turn.kept], *turn.new]
            prompt = "".join(self._texts.text(content, tokens) for content, tokens in segments)
            body |= {"messages": [{"role": "user", "content": prompt}], "temperature": 0.0, "ignore_eos": True}
            body |= {"max_completion_tokens": recorded.output_tokens}
        path = recorded.path or CHAT
        if path == CHAT:
            body |= {"stream_options": {"include_usage": True}}
        return path, body

    async def _answer(self, path: str, body: dict[str, Any], sent: Sent) -> None:
        begin = last = time.perf_counter()
        async with self._http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                raise ValueError(f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace')}")
            async for event in _events(response):
                count_tokens(event, sent)
                if not (piece := text_of(event)):
                    continue
                now = time.perf_counter()
                if sent.ttft == 0.0:
                    sent.ttft = now - begin
                else:
                    sent.gaps.append(now - last)
                    sent.pieces.append(piece)
                last = now
        if sent.ttft == 0.0:
            raise ValueError("the answer is empty")


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    reader = EventReader()
    async for part in response.aiter_text():
        for event in reader.feed(part):
            yield event
        if reader.ended:
            return
    reader.close()


def text_of(event: Mapping[str, Any]) -> str:
    """Return the generated part of an event of chat, responses or messages: text, thinking or a part of a call."""
    delta: Any = event.get("delta")
    if delta is None:
        choice = (event.get("choices") or [{}])[0]
        delta = choice.get("delta") or {}
    if isinstance(delta, str):  # responses
        return delta
    calls = "".join(str(call.get("function") or "") for call in delta.get("tool_calls") or ())
    names = ("reasoning_content", "content", "thinking", "text", "partial_json")
    return "".join(str(delta.get(name) or "") for name in names) + calls


def count_tokens(event: Mapping[str, Any], sent: Sent) -> None:
    """Take the server's token counts, wherever an API has them."""
    for holder in (event, event.get("response") or {}, event.get("message") or {}):
        usage = holder.get("usage") or {}
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        apart = (usage.get("cache_read_input_tokens") or 0) + (usage.get("cache_creation_input_tokens") or 0)
        cached = details.get("cached_tokens") or usage.get("cache_read_input_tokens")
        fresh = usage.get("prompt_tokens") or usage.get("input_tokens")
        sent.prompt_tokens = fresh + apart if fresh else sent.prompt_tokens  # messages counts cached tokens apart
        sent.cached_tokens = cached or sent.cached_tokens
        sent.output_tokens = usage.get("completion_tokens") or usage.get("output_tokens") or sent.output_tokens

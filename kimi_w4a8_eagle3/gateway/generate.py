"""The one generator of answers: a conversation's prompt goes to the engine, and pieces of its answers come back."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .answer import Answer, Piece, Stops
from .conversation import Conversation, Sampling
from .engine import Engine
from .errors import Refusal
from .render import Prompt

_INT64 = 2**63
_SGLANGS = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}  # other names are the same
_OWN = {"stops", "n", "seed"}  # the gateway's: it stops after thinking, and asks for each answer by itself
_Item = TypeVar("_Item")


@dataclass(slots=True, frozen=True)
class TokenLogprob:
    """A drawn token's logprob, with the likeliest candidates at its place as (token, logprob)."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True)
class Usage:
    """Tokens of a request; `thinking` and `cached` are parts of `answer` and `prompt`."""

    prompt: int = 0
    answer: int = 0
    thinking: int = 0
    cached: int = 0


@dataclass(slots=True)
class End:
    """How an answer ended. stop: the stop string that ended it. calls: all of them are whole.

    meta: the engine's own account of it.
    """

    reason: str  # "stop", "length" or "tool_calls"
    usage: Usage
    stop: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Delta:
    """What is new in one of the request's answers. end: of the answer, after these pieces."""

    index: int
    pieces: list[Piece]
    ids: list[int]
    logprobs: list[TokenLogprob]
    end: End | None = None


class Generator:
    """Asks an engine.

    think_end: the token of `</think>`, up to which the tokens of an answer are thinking. bytes_of: those of a token.
    """

    def __init__(self, engine: Engine, think_end: int, bytes_of: Callable[[int], bytes]) -> None:
        self._engine, self._think_end, self._bytes_of = engine, think_end, bytes_of

    async def answers(self, conversation: Conversation, prompt: Prompt, streamed: bool) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of all `n` answers as they come; each has one with an end, unless an error ends all."""
        bodies = requests(conversation, prompt, streamed)
        if len(bodies) == 1:
            async with aclosing(self._one(0, conversation, prompt, bodies[0])) as deltas:
                async for delta in deltas:
                    yield delta
            return
        ones = [self._one(index, conversation, prompt, body) for index, body in enumerate(bodies)]
        async with aclosing(together(ones)) as deltas:
            async for _, delta in deltas:
                yield delta

    async def _one(
        self, index: int, conversation: Conversation, prompt: Prompt, body: dict[str, Any]
    ) -> AsyncGenerator[Delta, None]:
        tools = conversation.callable_tools
        declared = {tool.name: tool.parameters or {} for tool in tools} if tools else None
        answer = Answer(prompt.thinking, declared, Stops(conversation.sampling.stops))
        thinking = Thinking(prompt.thinking, self._think_end)
        async with aclosing(self._engine.generate(body)) as parts:
            async for part in parts:
                meta, ids = part["meta_info"], part["output_ids"]
                if conversation.sampling.max_tokens == 0:  # only the prefix cache is filled
                    usage = Usage(meta["prompt_tokens"], cached=meta.get("cached_tokens") or 0)
                    yield Delta(index, [], [], [], End("length", usage, meta=meta))
                    return
                thinking.count(ids)
                reason = meta["finish_reason"]
                pieces = answer.read(part["text"], ended=reason is not None)
                logprobs = logprobs_of(meta) if conversation.logprobs is not None else []
                kept = len(ids) if answer.stops.found is None else self._kept(ids, part["text"], answer.stops.behind)
                delta = Delta(index, pieces, ids[:kept], logprobs[:kept])
                if reason is not None or answer.stops.found is not None:
                    delta.end = _end(answer, meta, thinking.tokens)
                    delta.end.usage.answer -= len(ids) - kept
                yield delta
                if delta.end is not None:
                    return

    def _kept(self, ids: list[int], text: str, behind: str) -> int:
        """Return how many tokens of a step reach up to a stop string: with drafts, others may come with them."""
        shown, kept = text.encode(), len(ids)
        needed = len(shown) - len(behind.encode())
        while kept > 1:
            written = self._bytes_of(ids[kept - 1])
            size = len(written) if shown.endswith(written) else 0  # a control token is not in the text
            if len(shown) - size < needed:
                break
            shown, kept = shown[: len(shown) - size], kept - 1
        return kept


async def together(sources: Sequence[AsyncGenerator[_Item, None]]) -> AsyncGenerator[tuple[int, _Item], None]:
    """Yield what several sources yield, as it comes, with their number; an error of one ends all."""
    queue: asyncio.Queue[tuple[int, _Item] | Exception | None] = asyncio.Queue()

    async def put(number: int) -> None:
        try:
            async with aclosing(sources[number]) as items:
                async for item in items:
                    queue.put_nowait((number, item))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.ensure_future(put(number)) for number in range(len(sources))]
    try:
        left = len(tasks)
        while left:
            got = await queue.get()
            if isinstance(got, Exception):
                raise got
            if got is None:
                left -= 1
            else:
                yield got
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Thinking:
    """Counts the tokens of an answer's thinking, its end included."""

    def __init__(self, opened: bool, end: int) -> None:
        self._open, self._end, self.tokens = opened, end, 0

    def count(self, ids: list[int]) -> None:
        """Count the next tokens of the answer."""
        if self._open:
            self._open = self._end not in ids
            self.tokens += len(ids) if self._open else ids.index(self._end) + 1


def requests(conversation: Conversation, prompt: Prompt, streamed: bool) -> list[dict[str, Any]]:
    """Return the bodies for /generate, one for each answer: the engine gives `n` answers ids that cannot be aborted."""
    sampling = conversation.sampling
    params = sampling_params(sampling)
    if conversation.grammar is not None:
        params[conversation.grammar.kind] = conversation.grammar.text
    body: dict[str, Any] = {
        "input_ids": prompt.ids,
        "stream": streamed or bool(sampling.stops),
        # the grammar waits for the end of thinking; with thinking closed already it would wait for another one
        "require_reasoning": prompt.thinking,
    }
    if prompt.pictures:
        body["image_data"] = prompt.pictures
    if conversation.logprobs is not None:
        body |= {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": conversation.logprobs}
    if conversation.cache_salt is not None:
        body["cache_salt"] = conversation.cache_salt
    return each(body, sampling, params)


def each(body: dict[str, Any], sampling: Sampling, params: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the bodies of `n` answers, each with an id and a seed of its own."""
    bodies = []
    for index in range(sampling.n):
        own = params if sampling.seed is None else {**params, "sampling_seed": _int64(sampling.seed + index)}
        bodies.append({**body, "sampling_params": own, "rid": secrets.token_hex(16)})
    return bodies


def sampling_params(sampling: Sampling) -> dict[str, Any]:
    """Return SGLang's sampling parameters, without those that the client left open."""
    names = Sampling.__dataclass_fields__.keys() - _OWN
    given = {_SGLANGS.get(name, name): getattr(sampling, name) for name in names}
    params = {name: value for name, value in given.items() if value is not None}
    if sampling.max_tokens is not None:
        params["max_new_tokens"] = max(1, sampling.max_tokens)
    # text and ids begin and end where the model's do; the reader finds the markers, which are ordinary tokens
    return {**params, "spaces_between_special_tokens": False}


def _int64(seed: int) -> int:
    return (seed + _INT64) % (2 * _INT64) - _INT64


def logprobs_of(meta: dict[str, Any], kind: str = "output") -> list[TokenLogprob]:
    """Return the logprobs of the tokens that are new, or of kind "input" those of the prompt."""
    drawn = meta.get(f"{kind}_token_logprobs") or []
    tops = meta.get(f"{kind}_top_logprobs") or [None] * len(drawn)
    return [
        TokenLogprob(token, logprob, [(other, value) for value, other, *_ in top or ()])
        for (logprob, token, *_), top in zip(drawn, tops, strict=True)
    ]


def _end(answer: Answer, meta: dict[str, Any], thinking: int) -> End:
    usage = Usage(meta["prompt_tokens"], meta["completion_tokens"], thinking, meta.get("cached_tokens") or 0)
    found = answer.stops.found
    reason = "stop" if found is not None else str(meta["finish_reason"]["type"])
    if reason not in ("stop", "length"):
        raise Refusal(f"the engine ended this answer: {reason}", status=500)
    if reason == "stop" and found is None and answer.calls and not answer.broken:
        reason = "tool_calls"
    return End(reason, usage, found, meta)

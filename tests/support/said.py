"""Answers as a stock OpenAI client has them: thinking, text and calls, in one piece or put together from a stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import openai

MODEL = "kimi-k2.5-tiny"
Request = dict[str, Any]


@dataclass(frozen=True)
class Said:
    """An answer as its client has it; calls: id, name, arguments."""

    thought: str
    text: str
    calls: tuple[tuple[str, str, str], ...]
    finish: str


@contextmanager
def stock_client(base_url: str) -> Iterator[openai.OpenAI]:
    """OpenAI's own client of a server."""
    import openai  # a second, which only the workers that use it should spend

    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none") as client:
        yield client


def whole(client: openai.OpenAI, request: Request) -> Said:
    return said(client.chat.completions.create(model=MODEL, temperature=0, **request).choices[0])


def said(choice: Any) -> Said:
    message = choice.message
    calls = tuple((call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ())
    thought = getattr(message, "reasoning_content", None) or ""
    return Said(thought, message.content or "", calls, choice.finish_reason)


def streamed(client: openai.OpenAI, request: Request) -> Said:
    """The same, put together as clients do: by the index of a call."""
    thought, text = "", ""
    finished: list[str] = []
    calls: dict[int, list[str]] = {}
    for chunk in client.chat.completions.create(model=MODEL, temperature=0, stream=True, **request):
        for choice in chunk.choices:
            assert not finished or not choice.delta.content  # nothing follows the end
            thought += getattr(choice.delta, "reasoning_content", None) or ""
            text += choice.delta.content or ""
            for piece in choice.delta.tool_calls or ():
                call = calls.setdefault(piece.index, [piece.id, piece.function.name, ""])
                call[2] += piece.function.arguments or ""
            finished += [choice.finish_reason] if choice.finish_reason else []
    (finish,) = finished
    return Said(thought, text, tuple((call[0], call[1], call[2]) for _, call in sorted(calls.items())), finish)

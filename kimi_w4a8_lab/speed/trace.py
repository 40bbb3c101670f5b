"""Traces of traffic: when a request is sent, what its prompt shares with others, and how long its answer is.

A prompt is a sequence of segments. Two segments with the same content and the same number of tokens are the same text,
so a prefix cache can be simulated, or texts with the same prefixes made up, without the text of the recording.
`trace_readers.py` reads the formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from kimi_w4a8_eagle3.base.errors import KimiError


class Segment(NamedTuple):
    """Part of a prompt; equal segments are equal text."""

    content: str
    tokens: int


class Request(NamedTuple):
    """Recorded request of a client, which is sent as it is."""

    path: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """One request of a session.

    think_s: seconds between the previous answer's end and this request. messages: the new messages, where the trace
    has text. answer: content of the answer's segment, if prompts of later turns contain it. A turn without segments has
    an unknown length.
    """

    prompt: tuple[Segment, ...]
    output_tokens: int
    think_s: float = 0.0
    answer: str | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    request: Request | None = None

    @cached_property
    def prompt_tokens(self) -> int:
        return sum(segment.tokens for segment in self.prompt)


@dataclass(frozen=True)
class TraceSession:
    """Turns that follow one another. Subagents run beside them.

    start_s: seconds after the trace's start, or for a subagent after its parent's start. None: the trace does not say
    when the session starts, so that a number of users decides.
    """

    name: str
    turns: tuple[Turn, ...]
    start_s: float | None = None
    subagents: tuple[TraceSession, ...] = ()

    def walk(self) -> Iterator[TraceSession]:
        """Yield the session and its subagents."""
        yield self
        for subagent in self.subagents:
            yield from subagent.walk()


@dataclass(frozen=True)
class Trace:
    """Sessions of one file or folder. users: sessions active at once, where the recording was a closed loop.

    assumed: a sentence about what the format does not say.
    """

    name: str
    format: str
    sessions: tuple[TraceSession, ...]
    users: int | None = None
    assumed: str = ""

    @property
    def timed(self) -> bool:
        """True if the trace says when every session starts."""
        return all(session.start_s is not None for session in self.sessions)

    def turns(self) -> Iterator[Turn]:
        """Yield all turns, session by session."""
        for session in self.sessions:
            for part in session.walk():
                yield from part.turns

    def require_lengths(self) -> None:
        """Raise KimiError if the length of a prompt is unknown."""
        if not all(turn.prompt for turn in self.turns()):
            raise KimiError(
                "the trace has prompts without a length",
                where=self.name,
                expected='"prompt_tokens" in each turn of an agentic-trace',
                remedy="replay it on a server, or use a trace with lengths",
            )

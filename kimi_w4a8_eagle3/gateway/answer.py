"""One answer, read as it is written: thinking, text and calls in order, the same in a stream and as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .calls import fitting_tool, named_tool
from .reader import PartKind, Reader, is_json

_NONE = "null"  # arguments of a call without any, where JSON wants an object


@dataclass(slots=True, frozen=True)
class Thought:
    """A piece of thinking."""

    text: str


@dataclass(slots=True, frozen=True)
class Said:
    """A piece of the answer's text."""

    text: str


@dataclass(slots=True, frozen=True)
class Called:
    """The beginning of a call; `index` counts the answer's calls."""

    index: int
    name: str


@dataclass(slots=True, frozen=True)
class Arguments:
    """A piece of a call's arguments."""

    index: int
    text: str


@dataclass(slots=True, frozen=True)
class CallEnd:
    """The end of a call. whole: its arguments are JSON."""

    index: int
    whole: bool


Piece = Thought | Said | Called | Arguments | CallEnd


class Stops:
    """Finds stop strings in what a client sees of an answer.

    SGLang's own also act on thinking, and end an answer that only thought of one (sglang#40529).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._tail = ""  # that may begin a stop
        self.found: str | None = None
        self.behind = ""  # text that came with it, which no client sees

    def read(self, new: str) -> str:
        """Return the text that is certain to come before a stop; `found` is set where one begins behind it."""
        if not self._stops:
            return new
        text, self._tail = self._tail + new, ""
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            at, self.found = min(found)
            self.behind = text[at + len(self.found) :]
            return text[:at]
        held = max(_overlap(text, stop) for stop in self._stops)
        self._tail = text[len(text) - held :]
        return text[: len(text) - held]

    def rest(self) -> str:
        """Return what was held back, because no stop follows it."""
        rest, self._tail = self._tail, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text that begins a stop."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class Answer:
    """State of one answer.

    thinking: the prompt has opened thinking. declared: parameters of the tools that may be called; None for an answer
    without calls, in which their markers are dropped and what is between them is text.
    """

    def __init__(self, thinking: bool, declared: Mapping[str, Mapping[str, Any]] | None, stops: Stops) -> None:
        self.stops = stops
        self._declared = declared or {}
        self._calls = declared is not None
        self._reader = Reader(thinking, opens=True, calls=self._calls)
        self._id: str | None = None  # of a call whose function is known only by its arguments
        self._shown: list[str] = []  # arguments of the current call, without white space around them
        self._blanks = ""  # after them
        self._stopping: Said | Arguments | None = None  # what stops were last looked for in
        self.calls = 0
        self.broken = False  # a call whose arguments are no JSON

    def read(self, new: str, ended: bool = False) -> list[Piece]:
        """Return what is certain after this text; `ended`: no more text comes."""
        shown: list[Piece] = []
        for piece in self._pieces(new, ended) if self.stops.found is None else ():
            if not isinstance(piece, Said | Arguments):
                shown += [*self._rest(), piece]
                continue
            if self._stopping is None or type(piece) is not type(self._stopping):
                shown += self._rest()
            self._stopping = piece
            shown.append(replace(piece, text=self.stops.read(piece.text)))
            if self.stops.found is not None:
                if isinstance(piece, Arguments):
                    self.broken = True
                    shown.append(CallEnd(piece.index, whole=False))
                return _joined(shown)
        return _joined([*shown, *self._rest()] if ended else shown)

    def _rest(self) -> list[Piece]:
        rest = self.stops.rest()
        return [replace(self._stopping, text=rest)] if rest and self._stopping is not None else []

    def _pieces(self, new: str, ended: bool) -> list[Piece]:
        pieces: list[Piece] = []
        for kind, text in self._reader.read(new, ended):
            match kind:
                case PartKind.THOUGHT:
                    pieces.append(Thought(text))
                case PartKind.TEXT:
                    pieces.append(Said(text))
                case PartKind.ID if self._calls:
                    pieces += self._named(text.strip())
                case PartKind.ARGUMENTS if self._calls:
                    pieces += self._continued(text)
                case PartKind.CLOSED | PartKind.CUT if self._calls:
                    pieces += self._ended(kind is PartKind.CLOSED)
        return pieces

    def _named(self, call_id: str) -> Iterator[Piece]:
        self._id, self._shown, self._blanks = call_id, [], ""
        if name := named_tool(call_id, self._declared):
            yield self._begun(name)

    def _begun(self, name: str) -> Called:
        self._id = None
        self.calls += 1
        return Called(self.calls - 1, name)

    def _continued(self, text: str) -> Iterator[Piece]:
        text = self._blanks + text if self._shown else text.lstrip()
        news = text.rstrip()
        self._blanks = text[len(news) :]
        if not news:
            return
        before = "".join(self._shown) if len(self._shown) <= len(_NONE) else "-"
        self._shown.append(news)
        if _NONE.startswith(before):  # nothing was shown: the call may have no arguments
            news = before + news
            if _NONE.startswith(news):
                return
        if self._id is None:
            yield Arguments(self.calls - 1, news)

    def _ended(self, closed: bool) -> Iterator[Piece]:
        arguments = "".join(self._shown)
        if closed and arguments in ("", _NONE):
            arguments = "{}"
            if self._id is None:
                yield Arguments(self.calls - 1, arguments)
        elif self._id is None and arguments and _NONE.startswith(arguments):
            yield Arguments(self.calls - 1, arguments)
        if self._id is not None:
            if not (name := fitting_tool(self._id, arguments, self._declared)):
                yield Said(arguments)  # no client can answer a call without a name
                return
            yield self._begun(name)
            yield Arguments(self.calls - 1, arguments)
        whole = is_json(arguments)
        self.broken |= not whole
        yield CallEnd(self.calls - 1, whole)


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces with texts and arguments that follow one another as one, and without empty ones."""
    joined: list[Piece] = []
    for piece in pieces:
        if getattr(piece, "text", None) == "":
            continue
        match joined[-1] if joined else None, piece:
            case Thought(first), Thought(second):
                joined[-1] = Thought(first + second)
            case Said(first), Said(second):
                joined[-1] = Said(first + second)
            case Arguments(at, first), Arguments(index, second) if at == index:
                joined[-1] = Arguments(at, first + second)
            case _:
                joined.append(piece)
    return joined

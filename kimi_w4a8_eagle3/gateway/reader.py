"""One reader of Kimi's answers: thinking, text and tool calls, the same in a stream, however it is cut, and as a whole.

A marker of Kimi's format is a token of its own, but it arrives as text, and a model may also spell it. Inside a JSON
string of a call's arguments it belongs to the string. After thinking has ended, `<think>` and `</think>` are text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from enum import Enum, auto

_THINK, _ANSWER = "<think>", "</think>"
BEGIN, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_MARKERS = (SECTION, SECTION_END, BEGIN, ARGUMENTS, END)
_MARKERS = (_THINK, _ANSWER, *CALL_MARKERS)
_MARKER = re.compile(f"({'|'.join(map(re.escape, _MARKERS))})")
_PARTIAL = re.compile(rf"({'|'.join({re.escape(name[:n]) for name in _MARKERS for n in range(1, len(name))})})\Z")
_ID = re.compile(r"\s{0,64}\S{0,256}\s{0,64}")  # bounded, because it is matched again for every piece
_QUOTES = re.compile(r'\\.|\\\Z|"', re.DOTALL)  # an escaped quote does not count


class PartKind(Enum):
    """Kind of a piece of an answer."""

    THOUGHT = auto()
    SWITCH = auto()  # a marker of thinking
    TEXT = auto()
    MARKER = auto()  # a marker of calls, or what is lost between them
    ID = auto()
    ARGUMENTS = auto()
    CLOSED = auto()  # the end of a call
    CUT = auto()  # the end of an answer inside a call


class Reader:
    """State machine over one answer, whose pieces joined are the answer.

    thinking: the prompt has opened thinking. opens: the answer may open it itself, with its first word. calls: the
    request allows calls; without, their markers are pieces and everything between them is text.
    """

    def __init__(self, thinking: bool, opens: bool, calls: bool) -> None:
        self.thinking = thinking
        self._calls = calls
        self._state = self._opening if opens else self._words
        self._partial = ""  # a beginning of a marker
        self._held: list[str] = []  # texts and markers whose kind depends on what follows
        self._in_section = self._after_words = False
        self._arguments: list[str] = []  # that were passed on
        self._in_string = self._escaped = False  # at their end
        self._doubtful = False  # the first held marker ends the arguments if their string never closes
        self._pieces: list[tuple[PartKind, str]] = []

    def read(self, new: str, ended: bool = False) -> list[tuple[PartKind, str]]:
        """Return the pieces that are certain after this text; `ended`: no more text comes."""
        parts = _MARKER.split(self._partial + new)
        partial = None if ended else _PARTIAL.search(parts[-1])
        self._partial = partial[0] if partial else ""
        parts[-1] = parts[-1].removesuffix(self._partial)
        for part in filter(None, parts):
            self._state(part)
        if ended:
            self._end()
        pieces, self._pieces = self._pieces, []
        return pieces

    def _pass(self, kind: PartKind, text: str) -> None:
        self._pieces.append((kind, "".join(self._held) + text))
        self._held = []

    def _opening(self, part: str) -> None:
        """Read a `<think>` at the beginning, which Kimi's template or the model itself writes."""
        if not part.strip():
            self._held.append(part)
            return
        self._state = self._words
        if part == _THINK:
            self.thinking = True
            self._pass(PartKind.SWITCH, part)
        else:
            self._again([part])

    def _words(self, part: str) -> None:
        """Read thinking or text. White space alone between markers of a section is no text."""
        if part == _ANSWER and self.thinking:
            self.thinking = self._after_words = False
            self._pass(PartKind.SWITCH, part)
        elif part in CALL_MARKERS:
            self._pass(PartKind.MARKER, part)
            self._after_words = False
            if self._calls and part in (SECTION, SECTION_END):
                self._in_section = part == SECTION
            elif self._calls and part == BEGIN:
                self._state = self._id
        elif self._in_section and not self._after_words and not part.strip():
            self._held.append(part)
        else:
            self._after_words = True
            self._pass(PartKind.THOUGHT if self.thinking else PartKind.TEXT, part)

    def _id(self, part: str) -> None:
        """Read a call's id up to its arguments. Without them it is lost, and other text is no id."""
        if part == ARGUMENTS:
            self._pass(PartKind.ID, "")
            self._pass(PartKind.MARKER, part)
            self._state, self._arguments, self._in_string, self._escaped = self._call, [], False, False
        elif part in CALL_MARKERS or (part == _ANSWER and self.thinking):
            self._pass(PartKind.MARKER, "")
            self._state = self._words
            self._words(part)
        else:
            self._held.append(part)
            if not _ID.fullmatch("".join(self._held)):
                self._state = self._words
                self._again()

    def _call(self, part: str) -> None:
        """Read arguments up to their end.

        A marker inside a JSON string belongs to the string; any other marker ends the arguments. A string that never
        closes ends at its first marker that another marker follows.
        """
        if part not in CALL_MARKERS:
            self._count_quotes(part)
            if self._held and (self._doubtful or not part.strip()):
                self._held.append(part)
            else:
                self._pass_arguments(part)
        elif self._in_string:
            self._doubtful |= bool(self._held)
            self._held.append(part)
            self._escaped = False
        elif self._doubtful and not is_json("".join(self._arguments + self._held)):
            self._again([part])
        else:
            self._pass_arguments("")
            self._close(part)

    def _count_quotes(self, text: str) -> None:
        found = _QUOTES.findall("\\" + text if self._escaped else text)
        self._in_string ^= found.count('"') % 2 == 1
        self._escaped = found[-1:] == ["\\"]

    def _pass_arguments(self, text: str) -> None:
        self._arguments += [*self._held, text]
        self._doubtful = False
        self._pass(PartKind.ARGUMENTS, text)

    def _close(self, marker: str) -> None:
        self._state = self._words
        self._pass(PartKind.CLOSED, marker if marker == END else "")
        if marker != END:
            self._words(marker)

    def _again(self, more: Sequence[str] = ()) -> None:
        """Read what was held again, in another state; in arguments it ends them."""
        parts, self._held, self._doubtful = [*self._held, *more], [], False
        if self._state == self._call:
            self._close(parts.pop(0))
        for part in parts:
            self._state(part)

    def _end(self) -> None:
        while self._state == self._call:
            if self._held:
                self._again()
            else:
                self._pass(PartKind.CUT, "")
                self._state = self._words
        if self._state == self._opening:
            self._state = self._words
            self._again()
        if self._held:
            self._pass(PartKind.MARKER, "")


def is_json(text: str) -> bool:
    """Return True for the text of one JSON value."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True

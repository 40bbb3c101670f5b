"""A parser for Kimi's tool calls that finds the same calls in a stream, however it is cut, and in a whole answer.

SGLang's `kimi_k2` detector has separate parsers for streams and for whole answers, and they disagree. A call that the
token limit cuts off is lost in whole answers and becomes a complete call with the arguments `{}` in streams. An
argument that contains the end marker is torn in streams. Text after the calls is lost in whole answers.
"""

from __future__ import annotations

import json
import re
from typing import Any

from sglang.srt.function_call.core_types import StreamingParseResult, ToolCallItem
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.kimik2_detector import KimiK2Detector

from .hooks import Feature

PARSER = "kimi_k2"
_DETECTOR = "sglang.srt.function_call.kimik2_detector.KimiK2Detector"
FEATURE = Feature(
    "Kimi's tool calls",
    remove_when="SGLang's kimi_k2 parser finds the same calls in a stream and in a whole answer",
    needs=(
        f"{_DETECTOR}.detect_and_parse",
        f"{_DETECTOR}.parse_streaming_increment",
        f"{_DETECTOR}.finish",
        f"{_DETECTOR}.has_tool_call",
        f"{_DETECTOR}._resolve_function_name",
    ),
)
_QUOTE = re.compile(r'\\.|"', re.DOTALL)  # an escaped quote does not count


class KimiToolCalls(KimiK2Detector):
    """Parser of one answer's text and calls. Names, grammars and markers are SGLang's."""

    def __init__(self) -> None:
        super().__init__()
        self._begin, self._end = self.tool_call_start_token, self.tool_call_end_token
        markers = (self.bot_token, self.eot_token, self._begin, self.tool_call_argument_begin_token, self._end)
        self._marker = re.compile("|".join(map(re.escape, markers)))
        self._partial = re.compile("|".join({re.escape(text[:n]) for text in markers for n in range(1, len(text))}))
        self._buffer: str = ""  # text that was not passed on yet, or the arguments of the current call
        self._longest = max(map(len, markers))
        self._in_section = False
        self._call: str | None = None  # id of the call whose arguments are being parsed
        self._name: str | None = None
        # Characters of the arguments that were sent to the client, searched for an end, and searched for quotes.
        self._passed = self._looked = self._counted = 0
        self._in_string = False  # at `_counted`
        self._doubtful: tuple[int, int] | None = None  # an end inside a string, used if the string never closes
        self.incomplete_tool_call_indices: set[int] = set()  # SGLang gives them no `tool_calls` finish reason

    def has_tool_call(self, text: str) -> bool:
        """Return True if the text has a marker, which a client must never see."""
        return self._marker.search(text) is not None

    def detect_and_parse(self, text: str, tools: list[Any]) -> StreamingParseResult:
        """Parse a whole answer as a stream of one piece."""
        parts = [self.parse_streaming_increment(text, tools), self.finish(tools)]
        calls: list[ToolCallItem] = []
        for piece in (call for part in parts for call in part.calls):
            if piece.name:
                calls.append(piece)
            else:
                calls[-1].parameters += piece.parameters
        return StreamingParseResult(normal_text="".join(part.normal_text for part in parts), calls=calls)

    def parse_streaming_increment(self, new_text: str, tools: list[Any]) -> StreamingParseResult:
        """Parse the next piece of a stream."""
        self._buffer += new_text
        return self._read(tools, ended=False)

    def finish(self, tools: list[Any]) -> StreamingParseResult:
        """Parse the rest after the stream has ended, when no partial marker can become complete."""
        return self._read(tools, ended=True)

    def _read(self, tools: list[Any], ended: bool) -> StreamingParseResult:
        out = StreamingParseResult(normal_text="", calls=[])
        while self._read_text(out, ended) if self._call is None else self._read_arguments(out, tools, ended):
            pass
        return out

    def _read_text(self, out: StreamingParseResult, ended: bool) -> bool:
        """Read text up to the next call's arguments; return False while they have not begun."""
        found = self._marker.search(self._buffer)
        text, rest = self._buffer[: found.start() if found else self._certain(ended)], ""
        if not self._in_section or text.strip():
            out.normal_text += text
        self._buffer = self._buffer[len(text) :]
        if not found:
            return False
        rest = self._buffer[len(found[0]) :]
        if found[0] == self._begin:
            header = self._marker.search(rest)
            if not header and not ended:
                return False
            if header and header[0] == self.tool_call_argument_begin_token:
                self._call, rest = rest[: header.start()].strip(), rest[header.end() :].lstrip()
            else:  # the function's name is lost
                rest = rest[header.start() :] if header else ""
        elif found[0] in (self.bot_token, self.eot_token):
            self._in_section = found[0] == self.bot_token
        self._buffer = rest
        return True

    def _read_arguments(self, out: StreamingParseResult, tools: list[Any], ended: bool) -> bool:
        """Read arguments up to their end; return False while it has not come."""
        if not self._passed:
            self._buffer = self._buffer.lstrip()
        end = self._end_of_arguments(ended)
        arguments = self._buffer[: end[0] if end else self._certain(ended)].rstrip()
        closed = end is not None or ended
        if end and not arguments:
            arguments = "{}"
        first = self._name is None
        if first:
            self._name = self._resolve_function_name(self._call, tools, arguments)
            self.current_tool_id += self._name is not None
        if self._name and (first or len(arguments) > self._passed):
            name, news = self._name if first else None, arguments[self._passed :]
            out.calls.append(ToolCallItem(tool_index=self.current_tool_id, name=name, parameters=news))
            self._passed = len(arguments)
        if not closed:
            return False
        if self._name and not _is_json(arguments):
            self.incomplete_tool_call_indices.add(self.current_tool_id)
        self._buffer = self._buffer[end[1] :] if end else ""
        self._call = self._name = None
        self._passed = self._looked = self._counted = 0
        self._in_string, self._doubtful = False, None
        return True

    def _end_of_arguments(self, ended: bool) -> tuple[int, int] | None:
        """Return where the arguments end and where the text after them begins, or None while that is unknown.

        A marker inside a JSON string belongs to the string; any other marker ends the arguments. A string that never
        closes ends at its first marker that another marker follows.
        """
        while found := self._marker.search(self._buffer, self._looked):
            quotes = _QUOTE.findall(self._buffer, self._counted, found.start()).count('"')
            self._in_string ^= quotes % 2 == 1
            self._counted = found.start()
            end = found.start(), found.end() if found[0] == self._end else found.start()
            if not self._in_string:
                return end if self._doubtful is None or _is_json(self._buffer[: end[0]]) else self._doubtful
            if self._doubtful is None:
                after = self._buffer[found.end() :].lstrip()
                if len(after) < self._longest and not ended:
                    return None
                if not after or self._marker.match(after):
                    self._doubtful = end
            self._looked = found.end()
        self._looked = max(self._looked, len(self._buffer) - self._longest)
        return self._doubtful if ended else None

    def _certain(self, ended: bool) -> int:
        """Return how many characters of the buffer cannot belong to a marker, whatever follows."""
        if ended:
            return len(self._buffer)
        if self._doubtful is not None:
            return self._doubtful[0]
        if found := self._marker.search(self._buffer, self._looked):
            return found.start()
        for start in range(max(0, len(self._buffer) - self._longest + 1), len(self._buffer)):
            if self._partial.fullmatch(self._buffer, start):
                return start
        return len(self._buffer)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return not text.strip()
    return True


def install() -> None:
    """Make SGLang's `--tool-call-parser kimi_k2` use this parser."""
    FunctionCallParser.ToolCallParserEnum[PARSER] = KimiToolCalls

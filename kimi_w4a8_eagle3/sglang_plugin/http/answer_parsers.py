"""SGLang's parsers of Kimi's thinking and tool calls, replaced by two over one reader (`chat/reader.py`).

SGLang reads an answer with two parsers, each with separate code for streams and for whole answers, and they disagree.
A later `<think>`, in an argument or in the text, opens thinking anew and cuts what follows. A call that the token limit
cuts off is lost in whole answers and becomes a complete call with the arguments `{}` in streams. An argument that
contains the end marker is torn in streams. Text after the calls is lost in whole answers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sglang.srt.function_call.core_types import StreamingParseResult, ToolCallItem
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.kimik2_detector import KimiK2Detector as SglangCalls
from sglang.srt.parser import reasoning_parser as sglang
from xgrammar import StructuralTag

from ...gateway.calls import fitting_tool, named_tool
from ...gateway.reader import CALL_MARKERS, PartKind, Reader, is_json
from ...gateway.tags import one_call
from ..hooks import Feature

PARSER = "kimi_k2"
_NONE = "null"  # arguments of a call without any, where JSON wants an object
_CALLS = "sglang.srt.function_call.kimik2_detector.KimiK2Detector"
_THINKING = "sglang.srt.parser.reasoning_parser.KimiK2Detector"
FEATURE = Feature(
    "Kimi's thinking and tool calls",
    remove_when="SGLang's kimi_k2 parsers find the same thinking and calls in a stream and in a whole answer",
    needs=(
        f"{_CALLS}.detect_and_parse",
        f"{_CALLS}.parse_streaming_increment",
        f"{_CALLS}.finish",
        f"{_CALLS}.has_tool_call",
        f"{_CALLS}.get_structural_tag",
        f"{_CALLS}.get_auto_tool_call_structural_tag",
        f"{_THINKING}._detect_and_parse_impl",
        f"{_THINKING}._parse_streaming_increment_impl",
        f"{_THINKING}.finish",
    ),
)


class KimiThinking(sglang.KimiK2Detector):
    """Parser of an answer's thinking; everything else is passed to the parser of calls, or without one is text."""

    _in_reasoning: bool

    def __init__(self, *args: Any, tool_call_parser_active: bool = False, **named: Any) -> None:
        super().__init__(*args, **named)
        self._calls = tool_call_parser_active
        self._reader = Reader(self._in_reasoning, opens=not self.previous_content, calls=self._calls)
        self._held = ""  # thinking of a client that wants it in one piece

    def _detect_and_parse_impl(self, text: str) -> sglang.StreamingParseResult:
        return self._separate(text, ended=True)

    def _parse_streaming_increment_impl(self, new_text: str) -> sglang.StreamingParseResult:
        return self._separate(new_text)

    def finish(self) -> sglang.StreamingParseResult:
        """Return what was held back, once the answer has ended."""
        return self._separate("", ended=True)

    def _separate(self, text: str, ended: bool = False) -> sglang.StreamingParseResult:
        thoughts, rest = [self._held], []
        for kind, piece in self._reader.read(text, ended):
            if kind is PartKind.THOUGHT:
                thoughts.append(piece)
            elif kind is PartKind.TEXT or (self._calls and kind is not PartKind.SWITCH):
                rest.append(piece)
        self._in_reasoning = self._reader.thinking
        thought, self._held = "".join(thoughts), ""
        if self._in_reasoning and not self.stream_reasoning and not ended:
            thought, self._held = "", thought
        return sglang.StreamingParseResult("".join(rest), thought)


class KimiToolCalls(SglangCalls):
    """Parser of one answer's text and calls. Grammars and markers are SGLang's."""

    def __init__(self) -> None:
        super().__init__()
        self._reader = Reader(thinking=False, opens=False, calls=True)
        self._id: str | None = None  # of a call whose function is known only by its arguments
        self._arguments: list[str] = []  # of the current call, without white space around them
        self._blanks = ""  # after them
        self.incomplete_tool_call_indices: set[int] = set()  # SGLang gives them no `tool_calls` finish reason

    def get_auto_tool_call_structural_tag(
        self, tools: list[Any] | None = None, thinking_mode: bool = False, parallel_tool_calls: bool = True
    ) -> StructuralTag | None:
        """Hold `parallel_tool_calls: false` by a grammar also where no tool is strict."""
        if parallel_tool_calls or not tools:
            return None
        object_ = {"strict": True, "parameters": {"type": "object"}}
        loose = [tool.model_copy(update={"function": tool.function.model_copy(update=object_)}) for tool in tools]
        return self.get_structural_tag(loose, "auto", thinking_mode, parallel_tool_calls=False)

    def get_structural_tag(
        self,
        tools: list[Any] | None = None,
        tool_choice: Any = "auto",
        thinking_mode: bool = False,
        parallel_tool_calls: bool = True,
    ) -> StructuralTag | None:
        """Allow one call where the request does. SGLang 0.5.20 ignores the switch."""
        tag = super().get_structural_tag(tools, tool_choice, thinking_mode, parallel_tool_calls)
        if tag is None or parallel_tool_calls:
            return tag
        return StructuralTag.model_validate(one_call(tag.model_dump()))

    def has_tool_call(self, text: str) -> bool:
        """Return True if the text has a marker, which a client must never see."""
        return any(marker in text for marker in CALL_MARKERS)

    def detect_and_parse(self, text: str, tools: list[Any]) -> StreamingParseResult:
        """Parse a whole answer as a stream of one piece."""
        return self._parse(self._reader.read(text, ended=True), tools)

    def parse_streaming_increment(self, new_text: str, tools: list[Any]) -> StreamingParseResult:
        """Parse the next piece of a stream."""
        return self._parse(self._reader.read(new_text), tools)

    def finish(self, tools: list[Any]) -> StreamingParseResult:
        """Parse what was held back, once the answer has ended."""
        return self._parse(self._reader.read("", ended=True), tools)

    def _parse(self, pieces: Iterable[tuple[PartKind, str]], tools: list[Any]) -> StreamingParseResult:
        out = StreamingParseResult(normal_text="", calls=[])
        declared = {tool.function.name: tool.function.parameters or {} for tool in tools}
        for kind, text in pieces:
            if kind is PartKind.TEXT:
                out.normal_text += text
            elif kind is PartKind.ID:
                self._id, self._arguments, self._blanks = text.strip(), [], ""
                if name := named_tool(self._id, declared):
                    self._begin(out, name)
            elif kind is PartKind.ARGUMENTS:
                self._continue(out, text)
            elif kind in (PartKind.CLOSED, PartKind.CUT):
                arguments = "".join(self._arguments)
                if kind is PartKind.CLOSED and arguments in ("", _NONE):
                    self._arguments, arguments = [], "{}"
                    self._continue(out, arguments)
                if self._id is not None:
                    if not (name := fitting_tool(self._id, arguments, declared)):
                        out.normal_text += arguments  # no client can answer a call without a name
                        continue
                    self._begin(out, name, arguments)
                if not is_json(arguments):
                    self.incomplete_tool_call_indices.add(self.current_tool_id)
        return out

    def _begin(self, out: StreamingParseResult, name: str, arguments: str = "") -> None:
        self._id = None
        self.current_tool_id += 1
        out.calls.append(ToolCallItem(tool_index=self.current_tool_id, name=name, parameters=arguments))

    def _continue(self, out: StreamingParseResult, text: str) -> None:
        text = self._blanks + text if self._arguments else text.lstrip()
        news = text.rstrip()
        self._blanks = text[len(news) :]
        if not news:
            return
        held = "".join(self._arguments) if len(self._arguments) <= len(_NONE) else "-"
        self._arguments.append(news)
        if _NONE.startswith(held):  # nothing was shown: the call may have no arguments
            news = held + news
            if _NONE.startswith(news):
                return
        if self._id is None and out.calls and out.calls[-1].tool_index == self.current_tool_id:
            out.calls[-1].parameters += news
        elif self._id is None:
            out.calls.append(ToolCallItem(tool_index=self.current_tool_id, name=None, parameters=news))


def install() -> None:
    """Make SGLang's parsers `kimi_k2` of thinking and of tool calls use this reader."""
    FunctionCallParser.ToolCallParserEnum[PARSER] = KimiToolCalls
    sglang.ReasoningParser.DetectorMap[PARSER] = KimiThinking

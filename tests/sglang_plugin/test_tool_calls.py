"""Tool calls and thinking through SGLang's parsers with our detector, for streams with any cuts and whole answers.

EAGLE3 commits one to four tokens a step, so a stream's pieces have one to four tokens. Short answers are cut in every
way, long ones in 300. A token is what Kimi's tokenizer makes one of: each marker, and pieces of text.
"""

from __future__ import annotations

import json
from typing import Any

from support.sglang_program import BOTH, found

S, E = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
B, A, X = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def call(name: str, index: int, *arguments: str) -> list[str]:
    return [B, f"functions.{name}:{index}", A, *arguments, X]


# name -> (tokens, thinking, content, calls, which calls are incomplete)
Answer = tuple[list[str], str, str, list[list[str]], list[int]]
A1, C1 = '{"query": "a"}', '{"city": "Rome"}'
ANSWERS: dict[str, Answer] = {
    "no call": (["a <", "</think>", "1 <", " 2 and <", "|x", "<|"], "a <", "1 < 2 and <|x<|", [], []),
    "one call": (["I", "</think>", S, *call("search", 0, '{"', "query", '": "a"}'), E], "I", "", [["search", A1]], []),
    "two calls": (
        ["hm", "</think>", S, *call("search", 0, A1), *call("get_weather", 1, '{"city":', ' "Rome"}'), E],
        "hm", "", [["search", A1], ["get_weather", C1]], [],
    ),
    "two sections": (
        ["</think>", S, *call("search", 0, A1), E, S, *call("get_weather", 1, C1), E],
        "", "", [["search", A1], ["get_weather", C1]], [],
    ),
    "text before": (["</think>", "Let", " me.", S, *call("search", 0, A1), E], "", "Let me.", [["search", A1]], []),
    "text after": (["</think>", S, *call("search", 0, A1), E, "Done", "."], "", "Done.", [["search", A1]], []),
    "nested": (
        ["</think>", S, *call("search", 0, '{"query": {"a": [1, {"b": "}"}],', ' "c": "{\\""}}'), E],
        "", "", [["search", '{"query": {"a": [1, {"b": "}"}], "c": "{\\""}}']], [],
    ),
    "unicode": (
        ["</think>", S, *call("search", 0, '{"query": "', "Zü", "rich ", "東", "京", '"}'), E],
        "", "", [["search", '{"query": "Zürich 東京"}']], [],
    ),
    "a marker in the arguments": (
        ["</think>", S, *call("search", 0, '{"query": "<', "|tool_call_", "end|", '> ends"}'), E],
        "", "", [["search", '{"query": "<|tool_call_end|> ends"}']], [],
    ),
    "markers in a row in the arguments": (
        ["</think>", S, *call("search", 0, '{"query": "\\"', S, B, 'x"}'), *call("search", 1, A1), E],
        "", "", [["search", '{"query": "\\"' + S + B + 'x"}'], ["search", A1]], [],
    ),
    "thinking without an end": (["I", " need", S, *call("search", 0, A1), E], "I need", "", [["search", A1]], []),
    "a cut thought": (["I", " think", " on"], "I think on", "", [], []),
    "no section end": (["</think>", S, *call("search", 0, A1)], "", "", [["search", A1]], []),
    "no end of the call": (["</think>", S, B, "functions.search:0", A, A1], "", "", [["search", A1]], []),
    "cut in the arguments": (
        ["</think>", S, B, "functions.search:0", A, '{"query": "lo', "ng"],
        "", "", [["search", '{"query": "long']], [0],
    ),
    "cut at a brace": (["</think>", S, B, "functions.search:0", A, "{"], "", "", [["search", "{"]], [0]),
    "the second is cut": (
        ["</think>", S, *call("search", 0, A1), B, "functions.get_weather:1", A, '{"city"'],
        "", "", [["search", A1], ["get_weather", '{"city"']], [1],
    ),
    "cut before a name": (["</think>", S, *call("search", 0, A1), B, "functions.ge"], "", "", [["search", A1]], []),
    "no JSON": (
        ["</think>", S, *call("search", 0, '{"query": "a'), *call("get_weather", 1, C1), E],
        "", "", [["search", '{"query": "a'], ["get_weather", C1]], [0],
    ),
    "no arguments": (["</think>", S, *call("search", 0), E], "", "", [["search", "{}"]], []),
    "a number for a name": (
        ["</think>", S, B, "0", A, '{"city":', ' "Rome"}', X, E], "", "", [["get_weather", C1]], [],
    ),
    "no prefix": (["</think>", S, B, "search:0", A, A1, X, E], "", "", [["search", A1]], []),
    "a name that is none": (
        ["</think>", S, B, "what?", A, A1, X, *call("search", 1, A1), E], "", "", [["search", A1]], [],
    ),
    "spaces": (
        ["</think>", S, " ", B, " functions.search:0 ", A, f" {A1} ", X, "\n", *call("search", 1, A1), " ", E, "\n"],
        "", "\n", [["search", A1], ["search", A1]], [],
    ),
}  # fmt: skip

READ = """
import itertools, json, random
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.parser.reasoning_parser import ReasoningParser

parameters = {"search": "query", "get_weather": "city"}
tools = [
    Tool(type="function", function={"name": name, "parameters": {"type": "object", "properties": {key: {}}}})
    for name, key in parameters.items()
]

def pieces(tokens):
    cuts = [()] if len(tokens) <= 11 else None
    if cuts is None:
        rng = random.Random(0)
        for _ in range(300):
            yield cut_into(tokens, iter(lambda: rng.randint(1, 4), 0))
        return
    for sizes in every(len(tokens)):
        yield cut_into(tokens, iter(sizes))

def every(count):
    if count == 0:
        yield ()
    for first in range(1, min(4, count) + 1):
        for rest in every(count - first):
            yield (first, *rest)

def cut_into(tokens, sizes):
    rest, out = iter(tokens), []
    while part := list(itertools.islice(rest, next(sizes, 4))):
        out.append("".join(part))
    return out

def read(stream, whole):
    thinking, calls = ReasoningParser("kimi_k2", not whole, True), FunctionCallParser(tools, "kimi_k2")
    if whole:
        thought, text = thinking.parse_non_stream("".join(stream))
        text, found = calls.parse_non_stream(text or "")
        return [thought or "", text, [[c.name, c.parameters] for c in found], sorted(incomplete(calls))]
    thought, content, found = "", "", {}
    for piece in [*stream, None]:
        new, text = thinking.parse_stream_end() if piece is None else thinking.parse_stream_chunk(piece)
        thought += new or ""
        results = [calls.parse_stream_chunk(text or "")] + ([calls.parse_stream_end()] if piece is None else [])
        for text, parts in results:
            content += text or ""
            for part in parts:
                one = found.setdefault(part.tool_index, ["", ""])
                one[0] += part.name or ""
                one[1] += part.parameters or ""
    return [thought, content, list(found.values()), sorted(incomplete(calls))]

def incomplete(calls):
    return getattr(calls.detector, "incomplete_tool_call_indices", ())

def letters(tokens):
    return [letter for token in tokens for letter in token]

answers = json.loads(ANSWERS)
print(json.dumps({
    name: {
        "whole": read(tokens, True),
        "streamed": [json.loads(line) for line in sorted({json.dumps(read(cut, False)) for cut in pieces(tokens)})],
        "by letter": read(letters(tokens), False),
    }
    for name, tokens in answers.items()
}))
"""


# SGLang's own reader again.
OWN = """
from sglang.srt.function_call.function_call_parser import FunctionCallParser as F
from sglang.srt.function_call.kimik2_detector import KimiK2Detector
F.ToolCallParserEnum["kimi_k2"] = KimiK2Detector
"""
# Ours with the fault of `support.wrong_answers`.
FORGETS = """
from kimi_w4a8_eagle3.sglang_plugin.tool_calls import KimiToolCalls as K
right = K.parse_streaming_increment
def forgets(reader, text, tools):
    marker = reader._marker.search(text)
    return right(reader, text[: marker.end()] if marker else text, tools)
K.parse_streaming_increment = forgets
"""


def read(newest: bool, first: str = "") -> dict[str, Any]:
    answers = json.dumps({name: answer[0] for name, answer in ANSWERS.items()})
    return found(first + READ.replace("ANSWERS", repr(answers)), newest)


@BOTH
def test_every_cut_gives_the_same_calls_and_the_right_ones(newest: bool) -> None:
    for name, got in read(newest).items():
        right = [*ANSWERS[name][1:]]
        assert got["whole"] == right, name
        assert got["streamed"] == [right], name
        assert got["by letter"] == right, name  # the markers, too, come in pieces


@BOTH
def test_sglangs_own_reader_loses_calls(newest: bool) -> None:
    """When this fails, SGLang has fixed a bug and our parser can shrink."""
    got = read(newest, OWN)
    right = {name: [*answer[1:4]] for name, answer in ANSWERS.items()}
    lost = {name for name in got if got[name]["whole"][:3] != right[name]}
    torn = {name for name in got if [call[:3] for call in got[name]["streamed"]] != [right[name]]}
    assert {"cut in the arguments", "the second is cut", "text after", "no arguments"} <= lost
    assert {"a marker in the arguments", "spaces"} <= torn
    assert "one call" not in lost | torn  # the harness reads it right


def test_a_reader_that_forgets_what_follows_a_marker_in_its_piece_is_found() -> None:
    """With one token per step a piece ends at its marker; with four it may contain text after it."""
    wrong = {name for name, got in read(False, FORGETS).items() if got["streamed"] != [[*ANSWERS[name][1:]]]}
    assert "one call" in wrong and "no call" not in wrong

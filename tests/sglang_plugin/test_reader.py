"""Tool calls and thinking through SGLang's parsers with our reader, for streams with any cuts and whole answers.

EAGLE3 commits one to four tokens a step, so a stream's pieces have one to four tokens. Short answers are cut in every
way, long ones in 300. A token is what Kimi's tokenizer makes one of: each marker, and pieces of text.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
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
    "two calls": (["hm", "</think>", S, *call("search", 0, A1), *call("get_weather", 1, '{"city":', ' "Rome"}'), E],
     "hm", "", [["search", A1], ["get_weather", C1]], []),
    "two sections": (["</think>", S, *call("search", 0, A1), E, S, *call("get_weather", 1, C1), E], "", "",
     [["search", A1], ["get_weather", C1]], []),
    "text before": (["</think>", "Let", " me.", S, *call("search", 0, A1), E], "", "Let me.", [["search", A1]], []),
    "text after": (["</think>", S, *call("search", 0, A1), E, "Done", "."], "", "Done.", [["search", A1]], []),
    "nested": (["</think>", S, *call("search", 0, '{"query": {"a": [1, {"b": "}"}],', ' "c": "{\\""}}'), E], "", "",
     [["search", '{"query": {"a": [1, {"b": "}"}], "c": "{\\""}}']], []),
    "unicode": (["</think>", S, *call("search", 0, '{"query": "', "Zü", "rich ", "東", "京", '"}'), E], "", "",
     [["search", '{"query": "Zürich 東京"}']], []),
    "a marker in the arguments": (
     ["</think>", S, *call("search", 0, '{"query": "<', "|tool_call_", "end|", '> ends"}'), E], "", "",
     [["search", '{"query": "<|tool_call_end|> ends"}']], []),
    "markers in a row in the arguments": (
     ["</think>", S, *call("search", 0, '{"query": "\\"', S, B, 'x"}'), *call("search", 1, A1), E], "", "",
     [["search", '{"query": "\\"' + S + B + 'x"}'], ["search", A1]], []),
    "thinking without an end": (["I", " need", S, *call("search", 0, A1), E], "I need", "", [["search", A1]], []),
    "thinking in the arguments": (
     ["I", "</think>", S, *call("search", 0, '{"query": "the ', "<think>", " tag and ", "</think>", '"}'), E], "I", "",
     [["search", '{"query": "the <think> tag and </think>"}']], []),
    "thinking in the text": (["<think>", "a <think>", "</think>", "<think>", " opens, ", "</think>", " ends"],
     "a <think>", "<think> opens, </think> ends", [], []),
    "thinking after a call": (["I", S, *call("search", 0, A1), E, " wait", "</think>", "Done"], "I wait", "Done",
     [["search", A1]], []),
    "a marker without a call": (["</think>", "after ", B, " comes the id, then ", A, "."], "",
     "after  comes the id, then .", [], []),
    "a cut thought": (["I", " think", " on"], "I think on", "", [], []),
    "no section end": (["</think>", S, *call("search", 0, A1)], "", "", [["search", A1]], []),
    "no end of the call": (["</think>", S, B, "functions.search:0", A, A1], "", "", [["search", A1]], []),
    "cut in the arguments": (["</think>", S, B, "functions.search:0", A, '{"query": "lo', "ng"], "", "",
     [["search", '{"query": "long']], [0]),
    "cut at a brace": (["</think>", S, B, "functions.search:0", A, "{"], "", "", [["search", "{"]], [0]),
    "the second is cut": (["</think>", S, *call("search", 0, A1), B, "functions.get_weather:1", A, '{"city"'], "", "",
     [["search", A1], ["get_weather", '{"city"']], [1]),
    "cut before a name": (["</think>", S, *call("search", 0, A1), B, "functions.ge"], "", "", [["search", A1]], []),
    "no JSON": (["</think>", S, *call("search", 0, '{"query": "a'), *call("get_weather", 1, C1), E], "", "",
     [["search", '{"query": "a'], ["get_weather", C1]], [0]),
    "no arguments": (["</think>", S, *call("search", 0), E], "", "", [["search", "{}"]], []),
    "a number for a name": (["</think>", S, B, "0", A, '{"city":', ' "Rome"}', X, E], "", "", [["get_weather", C1]],
     []),
    "no prefix": (["</think>", S, B, "search:0", A, A1, X, E], "", "", [["search", A1]], []),
    "a bare name": (["</think>", S, B, "search", A, A1, X, E], "", "", [["search", A1]], []),
    "another's id": (["</think>", S, B, "call_2", A, C1, X, E], "", "", [["get_weather", C1]], []),
    "an undeclared name": (["</think>", S, *call("find", 0, A1), E], "", "", [["find", A1]], []),
    "a name that is none": (["</think>", S, B, "what?", A, "{}", X, *call("search", 1, A1), E], "", "",
     [["what?", "{}"], ["search", A1]], []),
    "spaces": (
     ["</think>", S, " ", B, " functions.search:0 ", A, f" {A1} ", X, "\n", *call("search", 1, A1), " ", E, "\n"], "",
     "\n", [["search", A1], ["search", A1]], []),
}  # fmt: skip

READ = """
import itertools, json, random
from proof.reader import read

def pieces(tokens):
    rng = random.Random(0)
    drawn = ([rng.randint(1, 4) for _ in tokens] for _ in range(300))
    for sizes in every(len(tokens)) if len(tokens) <= 11 else drawn:
        rest = iter(tokens)
        yield ["".join(itertools.islice(rest, size)) for size in sizes]

def every(count):
    if count == 0:
        yield ()
    for first in range(1, min(4, count) + 1):
        for rest in every(count - first):
            yield (first, *rest)

answers = json.loads(ANSWERS)
print(json.dumps({
    name: {
        "whole": read(tokens, True, whole=True),
        "streamed": [json.loads(said) for said in sorted({json.dumps(read(cut, True)) for cut in pieces(tokens)})],
        "by letter": read("".join(tokens), True),
    }
    for name, tokens in answers.items()
}))
"""
COMPARE = """
import json
from proof.reader import compare
streams, found = compare(COUNT, 11)
print(json.dumps({"streams": streams, "found": found[:20]}))
"""
UNDECLARED = """
import json
from sglang.srt.parser.reasoning_parser import ReasoningParser
said = [ReasoningParser("kimi_k2", False, True).parse_non_stream(text) for text in json.loads(TEXTS)]
print(json.dumps({"said": said}))
"""


# Ours with faults; the first is that of `support.wrong_answers`.
_READER = "from kimi_w4a8_eagle3.gateway import reader\nR = reader.Reader\n"
FAULTS = {
    "forgets what follows a marker": """
from kimi_w4a8_eagle3.gateway.reader import _MARKER
from kimi_w4a8_eagle3.sglang_plugin.http.answer_parsers import KimiToolCalls as K
right = K.parse_streaming_increment
def forgets(reader, text, tools):
    marker = _MARKER.search(text)
    return right(reader, text[: marker.end()] if marker else text, tools)
K.parse_streaming_increment = forgets
""",
    "passes a part of a marker on": f"{_READER}import re\nreader._PARTIAL = re.compile('(?!)')",
    "does not see an escape that a cut parts": f"{_READER}import re\nreader._QUOTES = re.compile(r'\\\\.|\"')",
    "lets a marker in a string end it": f"{_READER}R._count_quotes = lambda self, text: None",
    "thinks on after the answer has begun": f"""{_READER}right = R._words
def words(self, part):
    self.thinking |= part == "<think>"
    right(self, part)
R._words = words""",
}


def read(newest: bool) -> dict[str, Any]:
    answers = json.dumps({name: tokens for name, (tokens, *_) in ANSWERS.items()})
    return found(READ.replace("ANSWERS", repr(answers)), newest)


@BOTH
def test_every_cut_gives_the_same_calls_and_the_right_ones(newest: bool) -> None:
    for name, got in read(newest).items():
        right = [*ANSWERS[name][1:]]
        assert got["whole"] == right, name
        assert got["streamed"] == [right], name
        assert got["by letter"] == right, name  # the markers, too, come in pieces


@BOTH
def test_drawn_answers_are_the_same_cut_at_every_character(newest: bool) -> None:
    got = found(COMPARE.replace("COUNT", "30"), newest)
    assert got["streams"] > 2000 and got["found"] == []


@BOTH
def test_without_tools_an_answer_has_no_marker_and_loses_nothing_else(newest: bool) -> None:
    texts = [f"I</think>a{S}{B}search:0{A}{A1}{X}{E}b", f"I{B}</think><think>"]
    got = found(UNDECLARED.replace("TEXTS", repr(json.dumps(texts))), newest)
    assert got["said"] == [["I", f"asearch:0{A1}b"], ["I", "<think>"]]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_reader_is_found(fault: str) -> None:
    """With one token per step a piece ends at its marker; with four it may contain text after it."""
    assert found(FAULTS[fault] + COMPARE.replace("COUNT", "16"), False)["found"]

"""The reader of answers: thinking, text and calls in streams with any cuts, and as a whole; stop strings.

EAGLE3 commits one to four tokens a step, so a stream's pieces have one to four tokens. Short answers are cut in every
way, long ones in 300; STREAMS=4000 draws 4,000 answers instead of 100. A token is what Kimi's tokenizer makes one of:
each marker, and pieces of text.
"""

from __future__ import annotations

import itertools
import os
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from support.transcripts import ARGUMENTS, BEGIN, PARAMETERS, SECTION, Transcript, transcripts
from support.transcripts import Said as Spoken

from kimi_w4a8_eagle3.gateway import reader
from kimi_w4a8_eagle3.gateway.answer import Answer as Reading
from kimi_w4a8_eagle3.gateway.answer import Arguments, Called, CallEnd, Said, Stops, Thought

STREAMS = int(os.environ.get("STREAMS", "100"))
S, E = SECTION, "<|tool_calls_section_end|>"
B, A, X = BEGIN, ARGUMENTS, "<|tool_call_end|>"
# An id is matched again for every piece, so a model that goes on with spaces would cost the square of them.
SPACES = Transcript(f"{B}{129 * ' '}{A}x", False, Spoken("", f"{129 * ' '}x", ()))
ENDS = [Transcript(written, False, None) for written in ("\n", f"{S} ")]


def call(name: str, index: int, *arguments: str) -> list[str]:
    return [B, f"functions.{name}:{index}", A, *arguments, X]


# name -> (tokens, thinking, content, calls, which calls are incomplete)
Case = tuple[list[str], str, str, list[list[str]], list[int]]
A1, C1 = '{"query": "a"}', '{"city": "Rome"}'
ANSWERS: dict[str, Case] = {
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


def pieces(tokens: list[str]) -> Iterator[list[str]]:
    rng = random.Random(0)
    drawn = ([rng.randint(1, 4) for _ in tokens] for _ in range(300))
    for sizes in every(len(tokens)) if len(tokens) <= 11 else drawn:
        rest = iter(tokens)
        yield ["".join(itertools.islice(rest, size)) for size in sizes]


def every(count: int) -> Iterator[tuple[int, ...]]:
    if count == 0:
        yield ()
    for first in range(1, min(4, count) + 1):
        for rest in every(count - first):
            yield (first, *rest)


def read(parts: Sequence[str], thinking: bool) -> list[Any]:
    """Return thinking, text, calls and the indices of incomplete calls of an answer that arrives in these parts."""
    declared = {name: {"type": "object", "properties": {key: {}}} for name, key in PARAMETERS.items()}
    answer = Reading(thinking, declared, Stops(()))
    thought = text = ""
    calls: list[list[str]] = []
    cut: list[int] = []
    for part in [*parts, None]:
        for piece in answer.read(part or "", ended=part is None):
            match piece:
                case Thought(new):
                    thought += new
                case Said(new):
                    text += new
                case Called(_, name):
                    calls.append([name, ""])
                case Arguments(index, new):
                    calls[index][1] += new
                case CallEnd(index, False):
                    cut.append(index)
    return [thought, text, calls, cut]


def differing(count: int) -> tuple[int, list[str]]:
    """Return the number of streams that were read, and the answers that a cut or the reader itself changed."""
    streams, found = 0, []
    for drawn in (SPACES, *ENDS, *transcripts(count, 11)):
        whole = read([drawn.written], drawn.thinking)
        read_all = reader.Reader(drawn.thinking, opens=True, calls=True)
        pieces = [*read_all.read(drawn.written), *read_all.read("", ended=True)]
        assert "".join(text for _, text in pieces) == drawn.written
        right = drawn.said and [
            drawn.said.thought,
            drawn.said.text,
            [list(c) for c in drawn.said.calls],
            list(drawn.said.cut),
        ]
        cuts = [[drawn.written[:at], drawn.written[at:]] for at in range(1, len(drawn.written))]
        streams += len(cuts) + 1
        if right not in (None, whole) or any(
            read(cut, drawn.thinking) != whole for cut in [*cuts, list(drawn.written)]
        ):
            found.append(drawn.written)
    return streams, found


@pytest.mark.parametrize("name", ANSWERS)
def test_every_cut_gives_the_same_calls_and_the_right_ones(name: str) -> None:
    tokens, *right = ANSWERS[name]
    assert read(["".join(tokens)], True) == right
    assert all(read(cut, True) == right for cut in pieces(tokens))
    assert read("".join(tokens), True) == right  # the markers, too, come in pieces


def test_drawn_answers_are_the_same_cut_at_every_character() -> None:
    streams, found = differing(STREAMS)
    assert streams > 50 * STREAMS and found == []


def test_without_tools_an_answer_has_no_marker_and_loses_nothing_else() -> None:
    def said(text: str) -> list[str]:
        parts = Reading(True, None, Stops(())).read(text, ended=True)
        kinds = ("".join(part.text for part in parts if isinstance(part, kind)) for kind in (Thought, Said))
        return list(kinds)

    assert said(f"I</think>a{S}{B}search:0{A}{A1}{X}{E}b") == ["I", f"asearch:0{A1}b"]
    assert said(f"I{B}</think><think>") == ["I", "<think>"]


FAULTS = {
    "passes a part of a marker on": ("_PARTIAL", re.compile("(?!)")),
    "does not see an escape that a cut parts": ("_QUOTES", re.compile(r'\\\\.|"')),
    "lets a marker in a string end it": ("_QUOTES", re.compile("(?!)")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_reader_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, *FAULTS[fault])
    assert differing(60)[1]


@pytest.mark.parametrize("step", [1, 2, 3, 7, 100])
def test_stops_act_on_the_answer_after_thinking(step: int) -> None:
    def said(text: str, *stops: str, thinking: bool = True) -> tuple[str, str, str | None]:
        answer = Reading(thinking, {}, Stops(stops))
        parts: list[Any] = []
        for at in range(0, len(text), step):
            parts += answer.read(text[at : at + step], ended=at + step >= len(text))
            if answer.stops.found is not None:
                break
        thought, text = ("".join(part.text for part in parts if isinstance(part, kind)) for kind in (Thought, Said))
        return thought, text, answer.stops.found

    assert said("33 + 14 = 47</think>It = 47", "=") == ("33 + 14 = 47", "It ", "=")
    assert said("a STOP</think>b STO", "STOP") == ("a STOP", "b STO", None)
    assert said("a</think>one END two", "END", "on") == ("a", "", "on")
    assert said("</think>x</thin", "</think>") == ("", "x</thin", None)
    call = f'</think>{S}{B}functions.s:0{A}{{"q": "a b"}}{X}{E}'
    assert said(call, "begin", "|>") == ("", "", None)  # a client sees no marker
    assert said(call, " b") == ("", "", " b")
    assert said("It = 47", "=", thinking=False) == ("", "It ", "=")
    assert said("endless", thinking=False) == ("", "endless", None)

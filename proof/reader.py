"""`python -m proof.reader`: Kimi's answers are read the same in a stream, however it is cut, and as a whole.

Answers with thinking, text and calls are drawn from a seed. Their text and arguments mention every marker. They are cut
at each boundary of a tokenizer's tokens, or of characters, and go through SGLang's parsers of this process. Half of
them are well formed, and what is right is known. The others are markers and texts in any order.
"""

from __future__ import annotations

import json
import random
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

MARKERS = (
    "<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>",
)  # fmt: skip
OPEN, CLOSE, SECTION, SECTION_END, BEGIN, ARGUMENTS, END = MARKERS
_WORDS = (
    "a", "the", " ", "\n", "<", "<|", "<|tool", "</th", "Zürich", "東京", "🦉", '"', "\\", "{", "}", "1.5", ":0", "```",
    "|>",
)  # fmt: skip
PARAMETERS = {"search": "query", "get_weather": "city"}


class Said(NamedTuple):
    """An answer as a client sees it. cut: indices of incomplete calls."""

    thought: str
    text: str
    calls: tuple[tuple[str, str], ...]
    cut: tuple[int, ...] = ()


class Transcript(NamedTuple):
    """Text of a model after a prompt that opened thinking or not; said: the right reading, if it is known."""

    written: str
    thinking: bool
    said: Said | None


def transcripts(count: int, seed: int) -> Iterator[Transcript]:
    """Draw answers, well formed and not in turn."""
    rng = random.Random(seed)
    for index in range(count):
        yield _well_formed(rng) if index % 2 else _any_order(rng)


def _text(rng: random.Random, *markers: str) -> str:
    """Words that may mention these markers. White space at the ends is none of a text's between calls."""
    return (
        "x" + "".join(rng.choice((*_WORDS, *markers)) for _ in range(rng.randrange(10))) + rng.choice(("", " y", "\n"))
    )


def _any_order(rng: random.Random) -> Transcript:
    parts = (*MARKERS, *MARKERS, *_WORDS, " functions.search:0 ", "search", "call_2", '{"query": "', '"}', "{}")
    return Transcript("".join(rng.choice(parts) for _ in range(rng.randrange(1, 24))), rng.random() < 0.5, None)


def _well_formed(rng: random.Random) -> Transcript:
    thinking = rng.random() < 0.7
    written = thought = text = ""
    calls: list[tuple[str, str]] = []
    if thinking:
        written = rng.choice(("", OPEN, f"\n{OPEN}"))
        thought = _text(rng, OPEN)
        written += thought
        if rng.random() < 0.3:
            written += _section(rng, calls)
            more = rng.choice(("", _text(rng, OPEN)))
            thought, written = thought + more, written + more
        if calls and rng.random() < 0.5:
            return Transcript(written, True, Said(thought, "", tuple(calls)))
        written += CLOSE
    for _ in range(rng.randrange(3)):
        new = _text(rng, OPEN, CLOSE)
        behind = rng.choice(("", END, ARGUMENTS, SECTION_END, SECTION))
        text, written = text + new, written + new + (_section(rng, calls) if behind == SECTION else behind)
    return Transcript(written, thinking, Said(thought, text, tuple(calls)))


def _section(rng: random.Random, calls: list[tuple[str, str]]) -> str:
    written = SECTION
    for _ in range(rng.randrange(1, 4)):
        name, blank = rng.choice(list(PARAMETERS)), rng.choice(("", "", " ", "\n"))
        values = {PARAMETERS[name]: "".join(rng.choice((*_WORDS, *MARKERS)) for _ in range(rng.randrange(9)))}
        arguments = json.dumps(values, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, None, 1)))
        call_id = rng.choice((f"functions.{name}:{len(calls)}", f"{name}:7", name, "call_2", f"{len(calls)}"))
        written += f"{blank}{BEGIN}{blank}{call_id}{ARGUMENTS}{blank}{arguments}{blank}{END}"
        calls.append((name, arguments))
    return written + rng.choice(("", " ")) + SECTION_END


def read(pieces: Sequence[str], thinking: bool, whole: bool = False) -> Said:
    """Read an answer that arrives in these pieces, or whole, by SGLang's parsers `kimi_k2` of this process."""
    from sglang.srt.entrypoints.openai.protocol import Tool  # start-up: only with an environment for SGLang
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    schemas = {name: {"type": "object", "properties": {key: {}}} for name, key in PARAMETERS.items()}
    tools = [Tool(type="function", function={"name": name, "parameters": schemas[name]}) for name in schemas]
    thoughts = ReasoningParser("kimi_k2", not whole, thinking, tool_call_parser_active=True)
    calls = FunctionCallParser(tools, "kimi_k2")
    thought = text = ""
    found: dict[int, list[str]] = {}
    for piece in ["".join(pieces)] if whole else [*pieces, None]:
        if whole:
            new, rest = thoughts.parse_non_stream(str(piece))
            results = [calls.parse_non_stream(rest or "")]
        else:
            new, rest = thoughts.parse_stream_end() if piece is None else thoughts.parse_stream_chunk(piece)
            results = [calls.parse_stream_chunk(rest or "")] + ([calls.parse_stream_end()] if piece is None else [])
        thought += new or ""
        for more, parts in results:
            text += more or ""
            for part in parts:
                call = found.setdefault(part.tool_index, ["", ""])
                call[0] += part.name or ""
                call[1] += part.parameters or ""
    cut: Any = getattr(calls.detector, "incomplete_tool_call_indices", ())
    return Said(thought, text, tuple((name, arguments) for name, arguments in found.values()), tuple(sorted(cut)))


def differences(drawn: Transcript, tokens: Sequence[str]) -> list[str]:
    """Compare the whole answer with what is right, and streams cut after one or after all tokens with the whole."""
    whole = read([drawn.written], drawn.thinking, whole=True)
    found = [] if drawn.said in (None, whole) else [f"whole: {whole}, right: {drawn.said}"]
    cuts = [["".join(tokens[:at]), "".join(tokens[at:])] for at in range(1, len(tokens))]
    for pieces in [*cuts, tokens]:
        if (said := read(pieces, drawn.thinking)) != whole:
            found.append(f"streamed as {pieces}: {said}, whole: {whole}")
    return found


def tokens_of(text: str, tokenizer: Any) -> list[str]:
    """Cut the text where a tokenizer's tokens end and a detokenizer could pass them on; without one into characters."""
    if tokenizer is None:
        return list(text)
    ids = tokenizer.encode(text)
    starts = [tokenizer.decode(ids[:end]) for end in range(len(ids) + 1)]
    starts = [start for start in starts if text.startswith(start)]
    return [end[len(start) :] for start, end in pairwise(starts)]


def compare(count: int, seed: int, tokenizer: Any = None) -> tuple[int, list[str]]:
    """Return the number of streams that were compared, and all differences."""
    streams, found = 0, []
    for drawn in transcripts(count, seed):
        tokens = tokens_of(drawn.written, tokenizer)
        streams += len(tokens)
        found += [f"{drawn}: {difference}" for difference in differences(drawn, tokens)]
    return streams, found


def main() -> int:
    parser = ArgumentParser(prog="python -m proof.reader", description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokenizer", help="folder with a tokenizer; its code runs. Without it: every character")
    given = parser.parse_args()
    from kimi_w4a8_eagle3.sglang_plugin.http import answer_parsers  # start-up: it imports sglang

    answer_parsers.install()
    tokenizer = None
    if given.tokenizer:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(given.tokenizer, trust_remote_code=True)
    streams, found = compare(given.count, given.seed, tokenizer)
    print(*found[:20], sep="\n", end="\n" if found else "")
    print(f"{given.count} answers, {streams} streams, {len(found)} differences")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

"""Minimal C++ parser that finds a function's definition: a lexer and bracket matching, no preprocessor.

Text inside `#if 0` counts like any other; brackets must balance in it, as they do in the headers edited here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""
      (?P<space>\s+)
    | (?P<comment>//[^\n]*|/\*.*?\*/)
    | (?P<directive>\#(?:\\\r?\n|[^\n])*)
    | (?P<raw>R"(?P<tag>[^\s()\\]{0,16})\(.*?\)(?P=tag)")
    | (?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    | (?P<name>[A-Za-z_]\w*)
    | (?P<number>\.?\d(?:[\w.']|[eEpP][+-])*)
    | (?P<punct>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_CLOSING = {"(": ")", "{": "}", "[": "]"}


@dataclass(frozen=True)
class CppFunction:
    """One function definition: its parameters and body as tokens."""

    parameters: tuple[str, ...]
    body: tuple[str, ...]
    body_start: int  # offset just behind the opening brace


def tokens(source: str) -> list[re.Match[str]]:
    """Return the tokens of `source` without white space, comments and preprocessor directives."""
    return [match for match in _TOKEN.finditer(source) if match.lastgroup not in ("space", "comment", "directive")]


def texts(source: str) -> tuple[str, ...]:
    """Return the text of each token, to compare code regardless of its layout."""
    return tuple(token.group() for token in tokens(source))


def functions(source: str, name: str) -> list[CppFunction]:
    """Return every definition of the functions with this name; ValueError when brackets do not match."""
    found, stream = [], tokens(source)
    for index, token in enumerate(stream[:-1]):
        if token.group() != name or stream[index + 1].group() != "(":
            continue
        close = _matching(stream, index + 1)
        brace = close + 1
        while brace < len(stream) and stream[brace].group() in ("const", "noexcept"):
            brace += 1
        if brace == len(stream) or stream[brace].group() != "{":
            continue
        end = _matching(stream, brace)
        parameters, body = (tuple(t.group() for t in stream[a:b]) for a, b in ((index + 2, close), (brace + 1, end)))
        found.append(CppFunction(parameters, body, stream[brace].end()))
    return found


def _matching(stream: list[re.Match[str]], opening: int) -> int:
    """Return the index of the bracket that closes the one at `opening`."""
    expected: list[str] = []
    for index in range(opening, len(stream)):
        text = stream[index].group()
        if text in _CLOSING:
            expected.append(_CLOSING[text])
        elif text in _CLOSING.values():
            if not expected or expected.pop() != text:
                break
            if not expected:
                return index
    raise ValueError(f"no match for {stream[opening].group()!r} at offset {stream[opening].start()}")

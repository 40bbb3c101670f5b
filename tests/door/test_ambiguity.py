"""Ordinary regular expressions pass, and those that xgrammar cannot follow in bounded time are refused."""

from __future__ import annotations

import pytest

from kimi_w4a8_eagle3.door import ambiguity
from kimi_w4a8_eagle3.door.ambiguity import TooAmbiguous, require_unambiguous

ORDINARY = (
    r"^[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}$",
    r"^(\+\d{1,2}\s)?\(?\d{3}\)?[\s.-]?\d{3}[\s.-]?\d{4}$",
    r"^\d{4}-\d{2}-\d{2}(T\d{2}:\d{2}:\d{2}(\.\d+)?(Z|[+-]\d{2}:\d{2})?)?$",
    r"^((25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)\.){3}(25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)$",
    r"^([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}$",
    r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    r"^v?\d+\.\d+\.\d+(-[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?$",
    r"([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
    r"(?P<year>\d{4})(?:, ?(?<month>\d\d))*",
    r'"([^"\\]|\\.)*"',
    r"(yes|no|maybe)(, (yes|no|maybe))*",
    r"(\w|\d|_|-)+",  # one class
    r"(?:[A-Z][a-z]+\s?)+",
    r"(a*?b)*",
    r"[\s\S]*",
    r"(.*)(.*)(.*)",  # more ways with its length, but as a power of it
    r"a{,3}\{x{2\}",
    "a)b(c",  # the compiler's to refuse
    "",
)
# With 163,001 tokens each of the first seven kept the scheduler for more than 5 s of one token's mask.
EXPLOSIVE = (
    r"(([^a]*)+)*",
    r"(([^a]|\d)*){0,8}",
    r"(([^a]+.)+.)+",
    r"(([^a]|\d)*)*",
    r"(((([^a])*)+)*|((([^a])?)*|(\d|\d)(\w)*))",
    r"(((.)+[a-z0-9_]|([^a]){1,3})*){1,300}",
    r"(((a|[^a])*){1,300})+(([^a])+.|(\d){1,3})*",
    r"((((.)*|(\w)+))*)+",
    r"([a-z]+)*[0-9]",
    r"(a|ab|b)*",
    r"(ab|a.)+",
    r"(..|...)*",
    r"(a?)*",
    r"([a-z]{1,3})+",
    r"([/\w .-]*)*/?",
    r"(\p{L}|[a-z][a-z]?)*",
    r"((a{4}){30}|a)*",
)


@pytest.mark.parametrize("pattern", ORDINARY)
def test_ordinary_patterns_pass(pattern: str) -> None:
    require_unambiguous(pattern)


@pytest.mark.parametrize("pattern", EXPLOSIVE)
def test_ambiguous_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(TooAmbiguous):
        require_unambiguous(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "(" * 400 + "a" + ")" * 400,
        f"({'|'.join(f'[a-z]{number % 10}' for number in range(200))})*",
        f"(.|..|{'.' * 1000})*",
    ],
)
def test_the_check_itself_is_bounded(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check limits its recursion depth and its steps, whatever the pattern."""
    spent = 0
    spend = ambiguity._Automaton.spend

    def counted(automaton: ambiguity._Automaton, work: int) -> None:
        nonlocal spent
        spent += work
        spend(automaton, work)

    monkeypatch.setattr(ambiguity._Automaton, "spend", counted)
    with pytest.raises(TooAmbiguous):
        require_unambiguous(pattern)
    assert spent <= ambiguity._MAX_WORK + 1

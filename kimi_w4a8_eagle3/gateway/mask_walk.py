"""Try a grammar before SGLang's schedulers compile it: its size, and the longest time that the mask of a token takes.

xgrammar fills a mask in SGLang's scheduler for every token of every request, while all other requests wait. Most of the
vocabulary is sorted when the grammar is compiled. The rest is tried per token in each state in which the parser is at
that moment. A state is a place in the grammar. A pattern such as `.*a.{60}` reaches 60 states at once.

The walk tries the next character wherever it comes. It goes on from the largest set of states, which finds what grows,
and in turn from the set that it has seen least often, which leads into every part of the grammar. At its end it repeats
characters behind the costliest mask: with `([a-z]+)+` the states stay the same, but each character makes masks slower.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarMatcher

MAX_GRAMMAR_BYTES = 2**25  # of memory; the schedulers keep `grammar_cache.MAX_GRAMMARS` of them
_WALK_S = 2.0
_IDLE = 64  # places that bring no new states before the walk ends
_TIMES = 3  # a slow mask is measured this often, because other processes disturb a single measurement
_TOO_SLOW = 10  # times the limit: no other process explains that
_REPEATS = 512
_SHOWN = 40  # last characters of a path
_LETTERS = (*map(chr, range(32, 127)), *"\n\t\réß٣中\u2003\u2028😀\x00")
# Of a set of states as xgrammar prints it; rule_start_pos is left out, because it counts the characters before.
_STATE = re.compile(r"rule_id=(\d+), sequence_id=(\d+), element_id=(\d+), rule_start_pos=-?\d+, sub_element_id=(\d+)")


def resident_bytes() -> int:
    """Return the memory of this process."""
    ctypes.CDLL(None).malloc_trim(0)  # what compiling needed for a moment does not count
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass
class _Place:
    matcher: GrammarMatcher
    text: str
    states: tuple[frozenset[Any], int]
    visited: bool = False


class _Walk:
    def __init__(self, matcher: GrammarMatcher) -> None:
        self.idle = 0  # places visited since new states were found
        self._seen: Counter[Any] = Counter()
        self._largest: list[tuple[int, int, int, _Place]] = []
        self._rarest: list[tuple[int, int, int, _Place]] = []
        self._number = 0
        self.reach(matcher, "", None, {})

    def reach(self, matcher: GrammarMatcher, text: str, before: Any, known: dict[Any, Any]) -> None:
        """Remember a place, unless its states are among those that are known already."""
        found = _STATE.findall(matcher._debug_print_internal_state().rpartition("[")[2])
        states = (frozenset(found), len(found))
        if states in known:
            return
        known[states] = True
        place = _Place(matcher.fork(), text[-_SHOWN:], states)
        self._number += 1
        times, number = self._seen[before, states], -self._number
        self._seen[before, states] += 1
        self.idle = 0 if times == 0 else self.idle
        heappush(self._largest, (-len(found), times, number, place))
        heappush(self._rarest, (times, -len(found), number, place))

    def places(self) -> Iterator[_Place]:
        """Yield the places to visit."""
        while self._largest or self._rarest:
            for heap in (self._largest, self._rarest):
                while heap:
                    place = heappop(heap)[-1]
                    if not place.visited:
                        place.visited = True
                        self.idle += 1
                        yield place
                        break


def costliest_mask(grammar: CompiledGrammar, enough_ms: float) -> tuple[float, str]:
    """Return the CPU time of the costliest mask, in milliseconds, and the last characters before it.

    The walk ends when a mask takes longer than `enough_ms`, when nothing new is found, or when time or memory is up.
    """
    import xgrammar  # it needs torch: only a trial process imports it

    bitmask = xgrammar.allocate_token_bitmask(1, grammar.tokenizer_info.vocab_size)
    walk, end = _Walk(xgrammar.GrammarMatcher(grammar)), time.thread_time() + _WALK_S
    costliest, there = (0.0, ""), xgrammar.GrammarMatcher(grammar)
    with suppress(RuntimeError):  # std::bad_alloc: the places fill the worker's memory
        for place in walk.places():
            if (ms := _mask_ms(place.matcher, bitmask, enough_ms)) > costliest[0]:
                costliest, there = (ms, place.text), place.matcher.fork()
            if costliest[0] > enough_ms or walk.idle > _IDLE or time.thread_time() > end:
                break
            known = {place.states: True}
            forced = place.matcher.find_jump_forward_string()
            for text in [forced] if forced else _LETTERS:
                if place.matcher.accept_string(text):
                    walk.reach(place.matcher, place.text + text, place.states, known)
                    place.matcher.rollback(1)
        for unit in _units(there, costliest[1]) if costliest[0] <= enough_ms else ():
            after = there.fork()
            if all(after.accept_string(unit) for _ in range(_REPEATS)):
                costliest = max(costliest, (_mask_ms(after, bitmask, enough_ms), (unit * _SHOWN)[-_SHOWN:]))
    return costliest


def _units(matcher: GrammarMatcher, text: str) -> list[str]:
    """Return the characters to repeat: one of each kind that may follow, and what stood before."""
    kinds: dict[str, str] = {}
    for letter in _LETTERS:
        if matcher.accept_string(letter):
            kinds.setdefault(matcher._debug_print_internal_state().rpartition("[")[2], letter)
            matcher.rollback(1)
    return [*kinds.values(), *(text[-length:] for length in (2, 3) if len(text) >= length)]


def _mask_ms(matcher: GrammarMatcher, bitmask: Any, enough_ms: float) -> float:
    least = float("inf")
    for _ in range(_TIMES):
        start = time.thread_time()
        matcher.fill_next_token_bitmask(bitmask)
        least = min(least, (time.thread_time() - start) * 1000)
        if not enough_ms < least < _TOO_SLOW * enough_ms:
            break
    return least

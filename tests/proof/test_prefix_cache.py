"""Faults that the proof of the prefix cache finds: other tokens, lost hits, and a comparison of nothing."""

from dataclasses import replace

import pytest

from proof.prefix_cache import CachedAnswer, CacheState, faults

FIRST = CachedAnswer(token_ids=tuple(range(20)), message={}, prompt=100, cached=0, clear=10)
SECOND = replace(FIRST, prompt=150, cached=99)


def known(answer: CachedAnswer) -> CachedAnswer:
    return replace(answer, cached=answer.prompt - 2)


def states(**changed: list[CachedAnswer]) -> list[CacheState]:
    right = {
        "cold": [FIRST, SECOND],
        "warm": [known(FIRST), known(SECOND)],
        "evicted": [FIRST, SECOND],
        "retracted": [known(FIRST), known(SECOND)],
    }
    return [CacheState(name, answers) for name, answers in (right | changed).items()]


def test_what_must_be_is_no_fault_nor_is_a_turned_tie() -> None:
    tie = replace(FIRST, token_ids=(*range(12), 99))  # after the tokens that are clear
    assert faults(states(evicted=[tie, SECOND]), drafts=True) == []


@pytest.mark.parametrize("state", ["warm", "evicted", "retracted"])
def test_another_token_is_found_in_every_state(state: str) -> None:
    other = replace(FIRST, token_ids=(99, *range(1, 20)), cached=98 if state == "warm" else 0)
    assert faults(states(**{state: [other, known(SECOND)]}), drafts=True) == [
        f"{state}: answer 0 has other tokens than cold"
    ]


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"warm": [replace(FIRST, cached=40), known(SECOND)]}, "warm: 40 tokens of a known prompt of 100"),
        ({"cold": [FIRST, replace(SECOND, cached=98)]}, "cold: 98 tokens of a first turn's 100"),
        ({"evicted": [known(FIRST), SECOND]}, "nothing was evicted"),
        ({"cold": [replace(FIRST, clear=0), SECOND]}, "nothing was compared"),
    ],
)
def test_lost_hits_and_empty_comparisons_are_found(changed: dict[str, list[CachedAnswer]], fault: str) -> None:
    [found] = faults(states(**changed), drafts=True)
    assert fault in found


def test_without_drafts_one_token_less_is_computed_again() -> None:
    assert len(faults(states(), drafts=False)) == 3  # two known prompts, and the second turn

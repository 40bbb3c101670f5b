"""Penalties of a verify step: at every position what plain decoding would have had there, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from kimi_w4a8_eagle3.sampling.penalties import CountTable, Penalized, Penalties

SIZE, PROMPT = 12, 5
tokens = st.integers(0, SIZE - 1)


def request(row: int, produced: Sequence[int] | None, **more: object) -> Penalized:
    given = {"frequency": 0.7, "presence": 0.3, "repetition": 1.3, "min_new": 0, "prompt": PROMPT, "stops": ()}
    return Penalized(row=row, counts=row, produced=produced, **given | more)


def table_of(counts: torch.Tensor) -> CountTable:
    table = CountTable(SIZE, torch.device("cpu"))
    table.counts = counts
    return table


def by_hand(logits: torch.Tensor, produced: Sequence[int], asked: Penalized) -> torch.Tensor:
    """The definition, for one position whose request has produced these tokens."""
    out = logits.clone()
    for token in set(produced):
        out[token] -= asked.frequency * produced.count(token) + asked.presence
        out[token] = out[token] * asked.repetition if out[token] < 0 else out[token] / asked.repetition
    if len(produced) < asked.min_new:
        out[list(asked.stops)] = float("-inf")
    return out


@given(st.lists(tokens, max_size=9), st.lists(tokens, min_size=4, max_size=4), st.integers(0, 3), st.integers(0, 12))
def test_a_verify_step_has_the_state_of_each_position(
    produced: list[int], chain: list[int], accepted: int, min_new: int
) -> None:
    """The request is the second of three in its batch; the others are not penalized. chain[0] is produced already."""
    produced = [*produced, chain[0]]
    asked = request(1, produced, min_new=min_new, stops=(2, 5))
    counts = torch.full((6, SIZE), 9, dtype=torch.int32)
    penalties = Penalties(table_of(counts), [asked])
    logits = torch.randn(3 * 4, SIZE, generator=torch.Generator().manual_seed(1)) * 3
    first = PROMPT + len(produced) - 1
    positions = torch.arange(first, first + 4).repeat(3)
    changed = logits.clone()
    penalties.apply(changed, positions, torch.tensor([[0] * 4, chain, [1] * 4]))
    assert torch.equal(changed[:4], logits[:4]) and torch.equal(changed[8:], logits[8:])
    for place in range(4):
        wanted = by_hand(logits[4 + place], [*produced, *chain[1 : place + 1]], asked)
        torch.testing.assert_close(changed[4 + place], wanted)
    # What is accepted is counted; the next step goes on from there, without the tokens.
    drawn = [*chain[1 : accepted + 1], 7, *[-1] * (3 - accepted)]
    penalties.count(torch.tensor([[3] * 4, drawn, [3] * 4]))
    later = Penalties(table_of(counts), [request(1, None, min_new=min_new, stops=(2, 5))])
    row, now = logits[:3].clone(), [*produced, *chain[1 : accepted + 1], 7]
    later.apply(row, torch.tensor([0, PROMPT + len(now) - 1, 0]))
    torch.testing.assert_close(row[1], by_hand(logits[1], now, asked))
    assert (counts[[0, 2, 3, 4, 5]] == 9).all()


def test_a_prefill_rebuilds_the_state() -> None:
    """The row belonged to another request, or this one was retracted."""
    counts = torch.full((2, SIZE), 3, dtype=torch.int32)
    Penalties(table_of(counts), [request(1, [4, 4])])
    assert counts[1].tolist() == [0, 0, 0, 0, 2, *[0] * 7] and (counts[0] == 3).all()


def test_the_table_has_a_row_for_every_penalized_request_that_is_alive() -> None:
    class Alive:
        """A request."""

    table = CountTable(SIZE, torch.device("cpu"))
    requests = [Alive() for _ in range(17)]
    assert [table.row(one) for one in requests] == [(row, True) for row in range(17)]
    assert [table.row(one) for one in requests] == [(row, False) for row in range(17)]
    assert table.counts.shape == (32, SIZE)
    table.counts[16] = 5
    del requests[3]
    assert table.row(Alive()) == (3, True)
    assert (table.counts[16] == 5).all() and len(table.counts) == 32

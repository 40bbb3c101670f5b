"""Outcomes of clients that fail a case of the fault table; the cases run a real server (`make faults`)."""

from __future__ import annotations

import pytest

from proof.fault_stage import ONLY_OK, VISIBLE, FaultRow
from proof.load.load_request import ClientOutcome, Manner, Record


def judged(*outcomes: ClientOutcome, allowed: frozenset[ClientOutcome] = VISIBLE) -> FaultRow:
    row = FaultRow()
    row.judge([Record(Manner.STREAM, 0, 0.0, 1.0, outcome) for outcome in outcomes], allowed)
    return row


def test_errors_that_a_client_sees_are_allowed_where_an_engine_is_killed() -> None:
    row = judged(ClientOutcome.OK, ClientOutcome.OK, ClientOutcome.CUT)
    assert (row.clients, row.problems) == ("2 ok, 1 cut", [])


@pytest.mark.parametrize(
    ("outcomes", "allowed"),
    [
        ((ClientOutcome.OK, ClientOutcome.CUT), ONLY_OK),
        ((ClientOutcome.OK, ClientOutcome.REFUSED), ONLY_OK),
        ((ClientOutcome.OK, ClientOutcome.TRUNCATED), VISIBLE),
        ((ClientOutcome.OK, ClientOutcome.WRONG), VISIBLE),
        ((ClientOutcome.CUT,), VISIBLE),
        ((), VISIBLE),
    ],
    ids=["lost in a restart", "refused in a restart", "shortened", "wrong", "no answer", "no request"],
)
def test_what_must_not_happen_is_a_problem(
    outcomes: tuple[ClientOutcome, ...], allowed: frozenset[ClientOutcome]
) -> None:
    assert judged(*outcomes, allowed=allowed).problems

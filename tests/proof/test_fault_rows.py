"""Outcomes of clients that fail a case of the fault table; the cases run real replicas (`make faults`)."""

from __future__ import annotations

import pytest

from proof.fault_stage import ONLY_OK, VISIBLE, Row
from proof.load.load_request import Manner, Outcome, Record


def judged(*outcomes: Outcome, allowed: frozenset[Outcome] = VISIBLE) -> Row:
    row = Row()
    row.judge([Record(Manner.STREAM, 0, 0.0, 1.0, outcome) for outcome in outcomes], allowed)
    return row


def test_errors_that_a_client_sees_are_allowed_where_an_engine_is_killed() -> None:
    row = judged(Outcome.OK, Outcome.OK, Outcome.CUT)
    assert (row.clients, row.problems) == ("2 ok, 1 cut", [])


@pytest.mark.parametrize(
    ("outcomes", "allowed"),
    [
        ((Outcome.OK, Outcome.CUT), ONLY_OK),
        ((Outcome.OK, Outcome.REFUSED), ONLY_OK),
        ((Outcome.OK, Outcome.TRUNCATED), VISIBLE),
        ((Outcome.OK, Outcome.WRONG), VISIBLE),
        ((Outcome.CUT,), VISIBLE),
        ((), VISIBLE),
    ],
    ids=["lost in a restart", "refused in a restart", "shortened", "wrong", "no answer", "no request"],
)
def test_what_must_not_happen_is_a_problem(outcomes: tuple[Outcome, ...], allowed: frozenset[Outcome]) -> None:
    assert judged(*outcomes, allowed=allowed).problems

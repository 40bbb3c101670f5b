"""A round of tries by hypothesis, which draws them, shrinks those that fail and keeps them in its database."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar
from unittest import SkipTest

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis.database import ExampleDatabase
from hypothesis.errors import Flaky
from hypothesis.strategies import SearchStrategy

Try = TypeVar("Try")


class Found(Exception):
    """A try that shows a fault."""


class Stopped(KeyboardInterrupt):
    """The end of the run. Hypothesis ends at once and does not keep the try."""


def try_round(
    strategy: SearchStrategy[Try],
    attempt: Callable[[Try], None],
    seed: str,
    most: int,
    phases: tuple[Phase, ...],
    database: ExampleDatabase | None = None,
) -> None:
    """Pass up to `most` tries to `attempt`. If it raises Found, smaller ones follow, and the smallest is kept.

    A fault that comes and goes ends the round. Stopped ends it, too.
    """

    @settings(  # above the seed, which else takes the database away
        max_examples=most,
        database=database,
        phases=phases,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @seeded(seed)
    @given(strategy)
    def tries(one: Try) -> None:
        attempt(one)

    with suppress(Found, Flaky, Stopped, SkipTest):  # skipped: the database is empty
        tries()

"""Requests drawn ahead of the senders: hostile ones in a thread, those of the contract in a process of its own.

Hypothesis changes settings of the whole interpreter while it draws, so two threads must not; and a counter-example to
a large schema may take it seconds, during which the others would send nothing.
"""

from __future__ import annotations

import itertools
import multiprocessing
import queue
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException

from .requests import FuzzRequest
from .strategies import TEMPLATES, contract_requests, only, without_closed_fields

_PATHS = frozenset({*TEMPLATES, "/v1/models", "/v1/models/{model}", "/v1/responses/{response_id}", "/model_info"})
_EXAMPLES = 10  # of one kind before the next
AHEAD = 8


class Drawn(Protocol):
    """What both kinds of queues have in common."""

    def put(self, item: FuzzRequest, block: bool = ..., timeout: float | None = ...) -> None:
        """Wait for room; queue.Full after the timeout."""

    def get(self, block: bool = ..., timeout: float | None = ...) -> FuzzRequest:
        """Wait for a request; queue.Empty after the timeout."""


@contextmanager
def contract_drawn(openapi: Mapping[str, Any], first_seed: int) -> Iterator[tuple[Drawn, Callable[[], bool]]]:
    """A queue that a process of its own keeps full with requests after the document; whether that process lives."""
    context = multiprocessing.get_context("spawn")
    drawn: Drawn = context.Queue(AHEAD)
    process = context.Process(target=_draw_contract, args=(dict(openapi), first_seed, drawn), daemon=True)
    process.start()
    try:
        yield drawn, process.is_alive
    finally:
        process.kill()
        process.join()


def draw(strategy: st.SearchStrategy[FuzzRequest], number: int, drawn: Drawn, ended: Callable[[], bool]) -> None:
    """Put a few requests of the strategy; the same number draws the same."""

    @seed(number)
    @settings(
        max_examples=_EXAMPLES,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def put(request: FuzzRequest) -> None:
        while not ended():
            with suppress(queue.Full):
                drawn.put(request, timeout=0.2)
                return

    with suppress(HypothesisException):  # a schema of which no counter-example can be made, for one
        put()


def _draw_contract(openapi: dict[str, Any], first_seed: int, drawn: Drawn) -> None:
    document = only(openapi, _PATHS)
    operations = [*contract_requests(without_closed_fields(document)), *contract_requests(document)]
    for turn in itertools.count():
        for number, strategy in enumerate(operations):
            draw(strategy, first_seed + 1_000 * turn + number, drawn, lambda: False)

"""Acceptance of a server on requests that nothing else sends beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from kimi_w4a8_eagle3.base.http import Address
from kimi_w4a8_eagle3.engine.metrics import Acceptance
from kimi_w4a8_lab.base.counters import acceptance_from_counters, counted, still

Answer = TypeVar("Answer")
_COUNTED_S = 10.0


def accepted(
    engine: Address, draft_tokens: int, ask: Callable[[], Sequence[Answer]]
) -> tuple[Sequence[Answer], Acceptance | None]:
    """Return the answers and their acceptance by the counters, which no other client may move meanwhile."""
    before = still(engine)
    answers = ask()
    after = counted(engine, before.requests + len(answers), _COUNTED_S)
    return answers, acceptance_from_counters(after.since(before), draft_tokens)

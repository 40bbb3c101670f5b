"""The canary: it repeats the requests of the start-up check while an engine serves.

Failures, other answers or no acceptance make the engine not ready. The canary runs while the engine is idle and its
acceptance is unknown, while its traffic accepts no draft token, or after new NaN logits or failed requests. A client's
text can cause these, so only the canary decides. Its own requests are in no metric, or a benchmark of an idle service
would take them for another client's. When a kind of request fails in two canaries in a row, the supervisor
ends the engine.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..base.errors import KimiError
from ..engine import startup_check
from ..engine.client import EngineClient, Generation
from ..engine.metrics import Acceptance
from .state import EngineState, Phase

logger = logging.getLogger(__name__)

Recent = Callable[[], Acceptance | None]


@dataclass(frozen=True)
class CanaryPolicy:
    """Schedule of the canary.

    idle_s: shortest interval while no request finishes. retry_s: interval after a collapse, or while the traffic's
    accept length is at the floor over at least `suspicious_steps` verify steps.
    """

    floor: float = startup_check.FLOOR
    idle_s: float = 300.0
    retry_s: float = 30.0
    suspicious_steps: int = 200
    poll_s: float = 5.0

    def due(self, since_last_s: float, recent: Acceptance | None, urgent: bool) -> bool:
        """Return True to run now. recent: acceptance of the last minute; None when idle. urgent: at `retry_s`."""
        if urgent:
            return since_last_s >= self.retry_s
        if recent is None:
            return since_last_s >= self.idle_s
        suspicious = recent.length <= self.floor and recent.steps >= self.suspicious_steps
        return suspicious and since_last_s >= self.retry_s


@contextmanager
def watching(state: EngineState, recent: Recent, policy: CanaryPolicy = CanaryPolicy()) -> Iterator[None]:
    """Run the canary in a thread of its own inside the block.

    recent: returns the engine's acceptance over the last minute (`OpsServer.acceptance`).
    """
    end = threading.Event()
    canary = Canary(state, policy)

    def watch() -> None:
        while not end.wait(policy.poll_s):
            canary.step(recent(), time.monotonic())

    threading.Thread(target=watch, name="canary", daemon=True).start()
    try:
        yield
    finally:
        end.set()  # a running canary request ends with its engine


class Canary:
    """Runs the canary when it is due, and moves the engine between READY and CHECKING."""

    def __init__(self, state: EngineState, policy: CanaryPolicy) -> None:
        self._state, self._policy = state, policy
        self._asked_at = 0.0
        self._collapsed_since: float | None = None  # `since` of the CHECKING that this object entered
        self._alarms = state.alarms

    def step(self, recent: Acceptance | None, now: float) -> None:
        """Run the canary if it is due at time.monotonic() `now`, and update the engine's phase."""
        state = self._state
        since = state.since  # read before the phase, so that a change in between is noticed below
        collapsed = state.phase is Phase.CHECKING and since == self._collapsed_since
        if not (state.ready or collapsed):
            return
        last = max(self._asked_at, state.entered)  # a wall clock that jumps must not keep the canary away
        if not self._policy.due(now - last, recent, collapsed or state.alarms > self._alarms):
            return
        self._asked_at, self._alarms = now, state.alarms
        try:
            answers = self._ask()
        except startup_check.KindFails as failing:
            self._take_out(since, collapsed, failing.what)
            if collapsed:
                state.broken = failing.what
            return
        if not answers:
            return
        reason = startup_check.fault_of(answers, state.openings)
        if state.num_draft_tokens and (found := startup_check.acceptance_of(answers, state.num_draft_tokens)):
            state.canary, state.canary_at = found, time.time()
            least = max(self._policy.floor, state.least_accept_length)
            reason = startup_check.acceptance_fault(answers, state.num_draft_tokens, state.groups, least) or reason
        if reason is None:
            if collapsed and state.enter_unless_changed(since, Phase.READY, "the canary's answers are right again"):
                logger.warning("the engine is ready again: the canary's answers are right")
        else:
            self._take_out(since, collapsed, reason)

    def _take_out(self, since: float, collapsed: bool, reason: str) -> None:
        state = self._state
        if not collapsed and state.enter_unless_changed(since, Phase.CHECKING, reason):
            self._collapsed_since = state.since
            logger.error("the engine is not ready: %s", reason)

    def _ask(self) -> list[Generation]:
        """Return no answers when the engine gave none; the progress watchdog decides whether it is alive."""
        try:
            state = self._state
            with EngineClient(state.engine_url, state.engine_secret, state.progress_timeout_s, counted=False) as client:
                startup_check.require_kinds(client, state.groups)
                return startup_check.ask(client, state.groups)
        except startup_check.KindFails:
            raise
        except (KimiError, ValueError) as error:
            logger.warning("the canary got no answer: %s", error)
            return []

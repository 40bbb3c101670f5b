"""State of one replica, as its supervisor sets it and probes show it, and the canary that watches a ready one.

A canary repeats the requests of the start-up check. Failures, other answers or no acceptance make the replica not
ready. It runs while the replica is idle and its acceptance is unknown, while its traffic accepts no draft token, or
after new NaN logits or failed requests. A client's text can cause these, so only the canary decides. When a kind of
request fails in two canaries in a row, the supervisor ends the engine.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from ..base.errors import KimiError
from ..engine import startup_check
from ..engine.client import EngineClient, Generation
from ..engine.metrics import Acceptance
from ..engine.startup_check import Openings

# Reasons of a restart. All are counted from 0, so that a rate includes the first one.
RESTARTS = ("ended", "stalled", "rolling", "error")


class Phase(str, Enum):
    """Phase of a replica's life; only READY takes new requests."""

    STARTING = "starting"  # the engine loads weights and builds kernels
    CHECKING = "checking"  # the engine answers; the canary prompts run
    READY = "ready"
    DRAINING = "draining"  # running requests finish, no new ones come
    STALLED = "stalled"  # its scheduler is silent, or no token advances
    DOWN = "down"


@dataclass
class ReplicaState:
    """One replica; written by its supervisor, read by the ops endpoint's threads.

    name: label of its metrics. base_url: address of its engine. progress_timeout_s: the watchdog's timeout.
    num_draft_tokens: None without speculation. groups: of ranks with requests of their own (DP attention), else 1.
    least_accept_length: of the canary; at or below it the replica is not ready. openings: of its answers to the canary
    prompts at its start. alarms: rows of NaN logits and failed requests that it has counted. broken: the reason to end
    it, when canary requests keep failing. last_progress: time.monotonic() when a token last advanced. history: the last
    phases with the time and reason of their start.
    """

    name: str
    base_url: str
    progress_timeout_s: float
    num_draft_tokens: int | None = None
    groups: int = 1
    least_accept_length: float = 1.0
    phase: Phase = Phase.STARTING
    reason: str = "not started"
    since: float = field(default_factory=time.time)
    canary: Acceptance | None = None
    canary_at: float | None = None
    openings: Openings | None = None
    alarms: float = 0.0
    broken: str = ""
    last_progress: float | None = None
    stalls: int = 0
    restarts: Counter[str] = field(default_factory=partial(Counter, dict.fromkeys(RESTARTS, 0)))
    history: deque[tuple[float, Phase, str]] = field(default_factory=partial(deque, maxlen=20))
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def enter(self, phase: Phase, reason: str = "") -> None:
        """Change the phase; `reason` is one sentence for the operator."""
        with self._lock:
            self._set(phase, reason)

    def enter_unless_changed(self, since: float, phase: Phase, reason: str = "") -> bool:
        """Call `enter` unless the phase has changed since `since` was read; return True if it did."""
        with self._lock:
            if self.since != since:
                return False
            self._set(phase, reason)
            return True

    def progressed(self, at: float) -> None:
        """Record that a token advanced at this time.monotonic(); the progress watchdog calls it."""
        self.last_progress = at

    def _set(self, phase: Phase, reason: str) -> None:
        if phase in (Phase.STARTING, Phase.DOWN):
            self.last_progress, self.broken = None, ""  # of the engine that is gone
        self.phase, self.reason, self.since = phase, reason, time.time()
        self.history.append((self.since, phase, reason))

    @property
    def ready(self) -> bool:
        """True when the replica takes requests now."""
        return self.phase is Phase.READY


@dataclass(frozen=True)
class FleetView:
    """A fleet as probes and metrics show it. A single server is a fleet of one without a router.

    replicas: returns all states, in a fixed order. live: returns False and the reason when the process should be
    restarted. router_url: address for clients. router_metrics_url: the router's own Prometheus endpoint.
    """

    recipe: str
    replicas: Callable[[], Sequence[ReplicaState]]
    live: Callable[[], tuple[bool, str]] = lambda: (True, "")
    router_url: str | None = None
    router_metrics_url: str | None = None


logger = logging.getLogger(__name__)

Recent = Callable[[str], Acceptance | None]
Connect = Callable[[str], EngineClient]


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
def canaries(
    view: FleetView, recent: Recent, connect: Connect = EngineClient, policy: CanaryPolicy = CanaryPolicy()
) -> Iterator[None]:
    """Run a canary for each replica, in a thread of its own, inside the block.

    recent: returns a replica's acceptance over the last minute, by its name (`OpsServer.acceptance`).
    connect: makes a client of an engine, with a key if the engine needs one.
    """
    end = threading.Event()

    def watch(state: ReplicaState) -> None:
        canary = Canary(state, connect, policy)
        while not end.wait(policy.poll_s):
            canary.step(recent(state.name), time.time())

    for state in view.replicas():
        threading.Thread(target=watch, args=(state,), name=f"canary-{state.name}", daemon=True).start()
    try:
        yield
    finally:
        end.set()  # a running canary request ends with its engine


class Canary:
    """The canary of one replica: runs when it is due, and moves the replica between READY and CHECKING."""

    def __init__(self, state: ReplicaState, connect: Connect, policy: CanaryPolicy) -> None:
        self._state, self._connect, self._policy = state, connect, policy
        self._asked_at = 0.0
        self._collapsed_since: float | None = None  # `since` of the CHECKING that this object entered
        self._alarms = state.alarms

    def step(self, recent: Acceptance | None, now: float) -> None:
        """Run the canary if it is due at Unix time `now`, and update the replica's phase."""
        state = self._state
        since = state.since  # read before the phase, so that a change in between is noticed below
        collapsed = state.phase is Phase.CHECKING and since == self._collapsed_since
        if not (state.ready or collapsed):
            return
        last = max(self._asked_at, state.canary_at or since)
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
            state.canary, state.canary_at = found, now
            least = max(self._policy.floor, state.least_accept_length)
            reason = startup_check.acceptance_fault(answers, state.num_draft_tokens, state.groups, least) or reason
        if reason is None:
            if collapsed and state.enter_unless_changed(since, Phase.READY, "the canary's answers are right again"):
                logger.warning("replica %s is ready again: the canary's answers are right", state.name)
        else:
            self._take_out(since, collapsed, reason)

    def _take_out(self, since: float, collapsed: bool, reason: str) -> None:
        state = self._state
        if not collapsed and state.enter_unless_changed(since, Phase.CHECKING, reason):
            self._collapsed_since = state.since
            logger.error("replica %s is not ready: %s", state.name, reason)

    def _ask(self) -> list[Generation]:
        """Return no answers when the engine gave none; the progress watchdog decides whether it is alive."""
        try:
            with self._connect(self._state.base_url) as client:
                startup_check.require_kinds(client, self._state.groups)
                return startup_check.ask(client, self._state.groups)
        except startup_check.KindFails:
            raise
        except (KimiError, ValueError) as error:
            logger.warning("replica %s: the canary got no answer: %s", self._state.name, error)
            return []

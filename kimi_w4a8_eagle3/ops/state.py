"""State of one engine, as its supervisor and the canary set it and probes show it."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from ..engine.metrics import Acceptance
from ..engine.startup_check import Openings

# Reasons of a restart. All are counted from 0, so that a rate includes the first one.
RESTARTS = ("ended", "stalled", "renewed", "error")


class Phase(str, Enum):
    """Phase of an engine's life; only READY takes new requests."""

    STARTING = "starting"  # the engine loads weights and builds kernels
    CHECKING = "checking"  # the engine answers; the canary prompts run
    READY = "ready"
    DRAINING = "draining"  # running requests finish, no new ones come
    STALLED = "stalled"  # its scheduler is silent, or no token advances
    DOWN = "down"


@dataclass
class EngineState:
    """One engine; written by its supervisor, read by the ops endpoint's threads.

    recipe: its name. base_url: the address for clients. progress_timeout_s: the watchdog's timeout.
    num_draft_tokens: None without speculation. groups: of ranks with requests of their own (DP attention), else 1.
    least_accept_length: of the canary; at or below it the engine is not ready. openings: of its answers to the canary
    prompts at its start. alarms: rows of NaN logits and failed requests that it has counted. broken: the reason to end
    it, when canary requests keep failing. last_progress: time.monotonic() when a token last advanced. history: the last
    phases with the time and reason of their start. since, entered: Unix time and time.monotonic() at which the phase
    began. started: Unix time of the engine's last start. engine_url, engine_secret: the engine's own address, while one
    runs. told: called with each phase.
    """

    recipe: str
    base_url: str
    progress_timeout_s: float
    num_draft_tokens: int | None = None
    groups: int = 1
    least_accept_length: float = 1.0
    phase: Phase = Phase.STARTING
    reason: str = "not started"
    since: float = field(default_factory=time.time)
    entered: float = field(default_factory=time.monotonic)
    started: float | None = None
    canary: Acceptance | None = None
    canary_at: float | None = None
    openings: Openings | None = None
    alarms: float = 0.0
    broken: str = ""
    last_progress: float | None = None
    stalls: int = 0
    restarts: Counter[str] = field(default_factory=partial(Counter, dict.fromkeys(RESTARTS, 0)))
    history: deque[tuple[float, Phase, str]] = field(default_factory=partial(deque, maxlen=20))
    engine_url: str = ""
    engine_secret: str = field(default="", repr=False)
    told: Callable[[Phase], object] = lambda phase: None
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
        self.phase, self.reason, self.since, self.entered = phase, reason, time.time(), time.monotonic()
        if phase is Phase.STARTING:
            self.started = self.since
        self.history.append((self.since, phase, reason))
        self.told(phase)

    @property
    def ready(self) -> bool:
        """True when the engine takes requests now."""
        return self.phase is Phase.READY

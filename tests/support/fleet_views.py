"""A fleet of states that a test sets, without a supervisor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kimi_w4a8_eagle3.ops.replica_state import Phase, ReplicaState


@dataclass
class HandmadeFleet:
    """A FleetView of given states."""

    states: list[ReplicaState]
    recipe: str = "tiny"
    router_url: str | None = None
    router_metrics_url: str | None = None
    alive: tuple[bool, str] = field(default=(True, ""))

    def replicas(self) -> Sequence[ReplicaState]:
        return self.states

    def live(self) -> tuple[bool, str]:
        return self.alive


def replica(name: str, base_url: str, phase: Phase = Phase.READY, reason: str = "") -> ReplicaState:
    """A state of the built-in model's depth."""
    state = ReplicaState(name, base_url, progress_timeout_s=120.0, num_draft_tokens=4)
    state.enter(phase, reason)
    return state

"""States of an engine that a test sets, without a supervisor."""

from __future__ import annotations

from kimi_w4a8_eagle3.ops.state import EngineState, Phase


def engine_state(base_url: str, phase: Phase = Phase.READY, reason: str = "") -> EngineState:
    """A state of the built-in model's depth."""
    state = EngineState("tiny", base_url, progress_timeout_s=120.0, num_draft_tokens=4)
    state.engine_url = base_url
    state.enter(phase, reason)
    return state

"""The canary's schedule and its phase changes; tests/e2e/test_ops.py runs it against a real engine."""

import json
import threading
import time
from itertools import count

import pytest
from support.engine_states import engine_state
from support.scripted_server import Script, scripted_server, whole
from support.waiting import until

from kimi_w4a8_eagle3.engine.metrics import Acceptance
from kimi_w4a8_eagle3.ops.canary import Canary, CanaryPolicy, watching
from kimi_w4a8_eagle3.ops.state import Phase

GOOD, BAD = Acceptance(3.5, 0.8, 1000), Acceptance(1.0, 0.0, 200)


DUE = {
    "idle-soon": (299, None, False, False),
    "idle": (300, None, False, True),
    "traffic": (9999, GOOD, False, False),
    "suspicious": (30, BAD, False, True),
    "suspicious-soon": (29, BAD, False, False),
    "few-steps": (9999, Acceptance(1.0, 0.0, 199), False, False),
    "retry": (30, None, True, True),
    "retry-soon": (29, None, True, False),
    "hopeful": (30, GOOD, True, True),
}


@pytest.mark.parametrize(("since_last_s", "recent", "collapsed", "due"), DUE.values(), ids=DUE)
def test_the_canary_runs_when_it_is_due(
    since_last_s: float, recent: Acceptance | None, collapsed: bool, due: bool
) -> None:
    assert CanaryPolicy().due(since_last_s, recent, collapsed) == due


def test_an_engine_that_does_not_answer_is_left_to_the_watchdog() -> None:
    state = engine_state("http://127.0.0.1:1")
    Canary(state, CanaryPolicy(idle_s=0)).step(None, state.entered + 1)
    assert state.phase is Phase.READY and state.canary is None


def test_a_phase_that_changed_meanwhile_is_kept() -> None:
    state = engine_state("http://127.0.0.1:1")
    since = state.since
    state.enter(Phase.DRAINING, "it ends")
    assert not state.enter_unless_changed(since, Phase.CHECKING, "collapsed")
    assert (state.phase, state.reason) == (Phase.DRAINING, "it ends")
    assert state.enter_unless_changed(state.since, Phase.DOWN, "ended") and state.phase is Phase.DOWN


def test_a_new_run_forgets_the_progress_of_the_last() -> None:
    state = engine_state("http://127.0.0.1:1")
    state.progressed(1.0)
    state.enter(Phase.STALLED)
    assert state.last_progress == 1.0
    for _ in range(30):
        state.enter(Phase.STARTING)
    assert state.last_progress is None and len(state.history) == 20
    assert (state.least_accept_length, state.alarms, state.stalls, state.restarts.total()) == (1, 0, 0, 0)


@pytest.mark.parametrize(("status", "fails"), [(500, 99), (500, 2), (400, 99), (503, 99)])
def test_a_kind_that_always_fails_takes_the_engine_out_and_then_ends_it(status: int, fails: int) -> None:
    """A bad request in the same batch makes one try fail, and a server that is full or refuses the kind is well."""
    tries, histogram = count(), [70, 15, 12, 3]

    def answer(_: int, body: bytes) -> Script:
        asked = json.loads(body) if body else {}
        if "seed" in asked and next(tries) < fails:
            return whole({"error": {"message": "ContractError"}}, status)
        words = {"message": {"content": str(asked.get("messages"))}, "finish_reason": "stop"}
        details = {"spec_tokens_details": {"spec_correct_drafts_histogram": histogram}}
        return whole({"data": [{"id": "m"}], "choices": [words], "sglext": details})

    with scripted_server(answer) as server:
        state = engine_state(server.base_url)
        state.num_draft_tokens = None
        policy = CanaryPolicy(idle_s=0, retry_s=0, poll_s=0.02)
        canary = Canary(state, policy)
        canary.step(None, state.entered + 1)
        if (status, fails) != (500, 99):
            assert (state.phase, state.broken) == (Phase.READY, "")
            state.num_draft_tokens, state.least_accept_length = 4, 1.8
            with watching(state, lambda: None, policy=policy):
                until(lambda: "must be above 1.8 in 400 verify steps" in state.reason)
                histogram[:] = [20, 25, 25, 30]
                until(lambda: state.reason == "the canary's answers are right again")
            assert state.ready and len(state.history) == 3
            until(lambda: not any(thread.name == "canary" for thread in threading.enumerate()))
            return
        assert (state.phase, state.broken, next(tries)) == (Phase.CHECKING, "", 3)
        canary.step(None, state.entered + 1)
        assert state.broken == "every seeded request fails inside the engine: ContractError"
        state.enter(Phase.STARTING)
        assert state.broken == ""


def test_a_failed_request_brings_the_canary_forward() -> None:
    state = engine_state("http://127.0.0.1:1")
    canary = Canary(state, CanaryPolicy())
    for alarms, now_s, asked_s in ((0, 31, -state.entered), (1, 31, 31), (1, 60, 31)):
        state.alarms += alarms
        canary.step(GOOD, state.entered + now_s)
        assert canary._asked_at == state.entered + asked_s


def test_a_wall_clock_that_goes_back_a_day_keeps_no_canary_away(monkeypatch: pytest.MonkeyPatch) -> None:
    state, now = engine_state("http://127.0.0.1:1"), time.time()
    state.enter(Phase.READY)
    monkeypatch.setattr(time, "time", lambda: now - 86400)
    asked = threading.Event()
    monkeypatch.setattr(Canary, "_ask", lambda canary: asked.set() or [])
    with watching(state, lambda: None, policy=CanaryPolicy(idle_s=0.01, poll_s=0.01)):
        assert asked.wait(30)

"""Traffic is simulated on SGLang's own scheduling classes, of both releases, and its tokens are exact."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support import sglang_program

PROGRAM = """
import json
from array import array
from kimi_w4a8_lab.speed.trace import Segment, Trace, TraceSession, Turn
from kimi_w4a8_lab.predict.layouts import EngineSettings, layout
from kimi_w4a8_lab.predict.simulate import run
from kimi_w4a8_lab.predict.simulation import SimulatedRun, SimulationJob, Slo
from kimi_w4a8_lab.predict.traffic import Traffic
from kimi_w4a8_lab.with_sglang.simulated_scheduler import SchedulerLimits, SimulatedScheduler
from proof.linear_step_time import LinearStepTime

TIME = LinearStepTime(0.1, 0.001, 0.0, 0.01, 0.0, 0.0)

def talk(name, turns, think=0.0):
    prompt, found = (Segment("system", 40),), []
    for at in range(turns):
        prompt = (*prompt, Segment(f"{name} asks {at}", 24))
        found.append(Turn(prompt, 16, think, f"{name} says {at}"))
        prompt = (*prompt, Segment(f"{name} says {at}", 16))
    return TraceSession(name, tuple(found), None)

def stranger(name, think):
    return TraceSession(name, (Turn((Segment(f"{name} asks", 64),), 16, think, None),), None)

def settings(**changes):
    return EngineSettings(**{"pool": 4000, "chunk": 64, "max_running": 8, "grain": 1, **changes})

def served(sessions, users, **changes):
    trace = Trace("t", "run", tuple(sessions), users)
    traffic = Traffic(trace, settings(**changes), TIME, users, 1e6, lockstep=True)
    rows = [[one.session.session.name, one.session.at, one.turn.prompt_tokens, one.cached, round(one.ttft_s, 6),
             round(one.tpot_s, 6), traffic.engines.index(one.replica)] for one in traffic.run()]
    kept = [[rank.pool.available_size(), rank.tree.evictable_size(), rank.tree.protected_size()]
            for engine in traffic.engines for rank in engine.ranks]
    return {"rows": rows, "kept": kept, "refused": len(traffic.refused)}

one = [talk("a", 3)]
pair = [talk("a", 1), talk("b", 1, 0.18)]  # b arrives in the second of the steps after a's prefill
found = {
    "cache": served(one, 1),
    "no cache": served(one, 1, prefix_cache=False),
    "eagle": served(one, 1, eagle=True, accept_length=2.5),
    "shared": served([talk("a", 1), talk("b", 1)], 1),
    "together": served([talk("a", 1), talk("b", 1), talk("c", 1)], 3),
    "router": served([talk(name, 3, 1.0) for name in "abcd"], 4, engines=2, pool=600),
    "ranks": served([talk(name, 1) for name in "abcd"], 4, groups=2),
    "small": served([talk(name, 2) for name in "abcdef"], 6, pool=330),
    "evicted": served([talk("a", 1), talk("b", 1), talk("c", 1), talk("d", 1), talk("a", 2)], 1, pool=150),
    "context": served([talk("a", 3)], 1, context=120),
    "queue": served([talk(name, 1) for name in "abcd"], 4, max_running=1, max_queued=2),
    "groups": served([talk(name, 1, think) for name, think in zip("abcd", (0, 0.2, 0.25, 0.35))], 4, groups=2),
    "delayed": served([talk(name, 1, think) for name, think in zip("abcd", (0, 0.2, 0.25, 0.35))], 4, groups=2,
                      delayed=True),
    "units": served(one, 1, grain=8),
    "alone": served(pair, 2, prefix_cache=False),
    "overlap": served(pair, 2, prefix_cache=False, overlap=True),
    "outside": served(one, 1, outside_s=(0.5,)),
    "known": served([talk(name, 1, think) for name, think in (("a", 0.0), ("b", 0.01))], 2, engines=2),
    "unknown": served([stranger("x", 0.0), stranger("y", 0.01), stranger("z", 5.0)], 3, engines=2),
}
loop = Trace("t", "AgentX", (stranger("x", 0.0),))
traffic = Traffic(loop, settings(), TIME, 1, 100.0, enough=5)
found["enough"] = [sum(one.arrived >= 10 for one in traffic.run()), traffic.horizon_s]

def starts(seed, lockstep=False, users=3):
    sessions = [stranger(name, 0.0) for name in "uvwxyz"]
    traffic = Traffic(Trace("t", "run", tuple(sessions), 3), settings(seed=seed), TIME, users, 100.0, lockstep)
    rows = sorted((one.arrived, one.session.session.name) for one in traffic.run())
    return [[round(at, 3), name] for at, name in rows]

found["starts"] = [starts(0), starts(0), starts(1), starts(0, lockstep=True)]
longer = Trace("t", "AgentX", (TraceSession("long", (Turn((Segment("x", 9000),), 16),), None),))
traffic = Traffic(longer, settings(), TIME, 2, 50.0)
found["never"] = [len(traffic.run()), len(traffic.refused)]

lengths = [1000, 200_000] * 3
turns = [Turn((Segment(f"p{at}", size),), 16) for at, size in enumerate(lengths)]
sessions = tuple(TraceSession(turn.prompt[0].content, (turn,), 0.0) for turn in turns)
once = SimulatedRun(layout=layout("agent"), users=None, accept_length=2.7)
job = SimulationJob(trace="t", slo=Slo(1e6, 1e6), horizon_s=50, runs=[once])
figures = run(job, Trace("t", "Mooncake", sessions), once)
found["half"] = [figures.requests, figures.refused, figures.good]
print(json.dumps(found))
"""


@pytest.fixture(scope="module", params=sglang_program.RELEASES, ids=sglang_program.VERSIONS)
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    return sglang_program.found(PROGRAM, request.param)


def column(found: dict[str, Any], case: str, at: int) -> list[Any]:
    return [row[at] for row in found[case]["rows"]]


def test_a_conversation_finds_its_turns_and_answers(found: dict[str, Any]) -> None:
    assert column(found, "cache", 2) == [64, 104, 144]
    # The last token of an answer is not computed before the next turn, but its unit is kept when the request ends.
    assert column(found, "cache", 3) == [0, 80, 120]
    assert column(found, "no cache", 3) == [0, 0, 0]


def test_with_eagle_a_prefix_is_a_pair_of_tokens_shorter(found: dict[str, Any]) -> None:
    assert column(found, "eagle", 3) == [0, 79, 119]


def test_times_are_those_of_the_steps(found: dict[str, Any]) -> None:
    # 64 tokens fill one chunk; 15 more tokens take a step each, or 2.5 of them with EAGLE.
    assert found["cache"]["rows"][0][4:6] == [0.164, 0.01]
    assert found["eagle"]["rows"][0][4:6] == [0.164, round(6 * 0.01 / 15, 6)]
    assert found["cache"]["rows"][1][4] == pytest.approx(0.1 + 24 * 0.001)


def test_with_overlap_a_request_waits_for_the_step_that_was_chosen_before(found: dict[str, Any]) -> None:
    first, second = (
        dict(zip(column(found, case, 0), column(found, case, 4), strict=True)) for case in ("alone", "overlap")
    )
    assert second["a"] == first["a"] and second["b"] == pytest.approx(first["b"] + 0.01)


def test_the_time_outside_of_the_scheduler_belongs_to_the_first_token(found: dict[str, Any]) -> None:
    assert found["outside"]["rows"][0][4:6] == [0.664, 0.01]


def test_a_run_ends_when_it_has_enough_requests_after_the_users_have_started(found: dict[str, Any]) -> None:
    count, ended = found["enough"]
    assert count == 5 and 10 < ended < 20


def test_the_router_asks_the_engine_with_fewer_requests_for_an_unknown_prompt(found: dict[str, Any]) -> None:
    """x and y run at the same time. z comes when both have ended, and the first engine is as free as the second."""
    assert column(found, "unknown", 6) == [0, 1, 0]
    assert column(found, "known", 6) == [0, 0]  # the system prompt is above the threshold of the cache


def test_another_user_finds_the_system_prompt(found: dict[str, Any]) -> None:
    assert column(found, "shared", 3) == [0, 40]


def test_chunks_hold_several_prompts(found: dict[str, Any]) -> None:
    """The chunk of 64 tokens ends with the first prompt, whose system prompt the next chunk finds."""
    assert sorted(column(found, "together", 3)) == [0, 40, 40]
    assert sorted(column(found, "together", 4)) == [0.164, 0.312, 0.312]


def test_the_router_keeps_conversations_together(found: dict[str, Any]) -> None:
    engines: dict[str, set[int]] = {}
    for row in found["router"]["rows"]:
        engines.setdefault(row[0], set()).add(row[6])
    assert all(len(used) == 1 for used in engines.values())


@pytest.mark.parametrize(
    "case", ["cache", "eagle", "together", "router", "ranks", "delayed", "small", "evicted", "units"]
)
def test_no_unit_of_a_pool_is_lost(found: dict[str, Any], case: str) -> None:
    sizes = {"small": 330, "evicted": 150, "router": 600, "units": 500}
    for free, cached, locked in found[case]["kept"]:
        assert (free + cached, locked) == (sizes.get(case, 4000), 0)


def test_a_full_pool_delays_requests_and_loses_none(found: dict[str, Any]) -> None:
    assert len(found["small"]["rows"]) == 12
    assert max(column(found, "small", 4)) > 0.5


def test_a_request_beyond_the_context_or_the_queue_is_refused(found: dict[str, Any]) -> None:
    """The third turn has 160 tokens with its answer. One request runs when two wait, and a fourth is refused."""
    assert (column(found, "context", 2), found["context"]["refused"]) == ([64, 104], 1)
    assert (len(found["queue"]["rows"]), found["queue"]["refused"]) == (3, 1)


def test_a_refused_request_has_missed_the_slo(found: dict[str, Any]) -> None:
    """Three of six prompts have more tokens than the context of `agent`, and no limit of time is missed."""
    assert found["half"] == [3, 3, 0.5]


def test_a_client_that_is_always_refused_does_not_keep_the_simulation_from_ending(found: dict[str, Any]) -> None:
    served, refused = found["never"]
    assert served == 0 and 50 < refused < 110  # two users, one second after each refusal


def test_users_start_one_after_another_unless_they_are_in_lockstep(found: dict[str, Any]) -> None:
    first, again, other, together = found["starts"]
    assert first == again != other and [name for _, name in first] != [name for _, name in other]
    assert len({at for at, _ in first[:3]}) == 3 and all(0 <= at < 10 for at, _ in first[:3])
    assert [at for at, _ in together[:3]] == [0, 0, 0] and len(together) == 6 < len(first)  # a recording is sent once


def test_the_prefill_delayer_lets_groups_prefill_together(found: dict[str, Any]) -> None:
    """SGLang's own rule: while another group has nothing to prefill, a request waits for up to 29 passes.

    The second request comes while the first group decodes, and its prefill would stop that group. A request that comes
    to an idle engine does not wait.
    """
    plain, delayed = (
        dict(zip(column(found, case, 0), column(found, case, 4), strict=True)) for case in ("groups", "delayed")
    )
    assert plain["b"] + 0.02 < delayed["b"] < plain["b"] + 29 * 0.01 and plain["a"] == delayed["a"]
    assert plain.keys() == delayed.keys()


def test_larger_units_round_the_tokens(found: dict[str, Any]) -> None:
    assert column(found, "units", 3) == [0, 80, 120]


@pytest.mark.slow
def test_both_releases_schedule_alike(request: pytest.FixtureRequest) -> None:
    first, second = (sglang_program.found(PROGRAM, newest) for newest in (False, True))
    assert json.dumps(first) == json.dumps(second)

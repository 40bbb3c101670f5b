"""Two ranks on one machine: the sums give the same answers, and a request that raises inside the scheduler ends alone.

Each rank quantizes its own slice of the intermediate activation, so logits differ in the last bits between TP sizes
(docs/perf/answers.md has the figures); answers that the model is sure of do not. A request that raises ends with
500; the client beside it gets the same answer, and the KV returns: both ranks must come to the same end. The faults are
planted by `support.planted_faults`.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import httpx
import psutil
import pytest
from support.engine_states import engine_state
from support.sampled import BODIES, answers
from support.tiny_servers import QUESTION, TWO_RANKS, ask, flush_cache, tiny_launch, with_faults
from support.waiting import until

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.http import bearer
from kimi_w4a8_eagle3.engine import startup_check
from kimi_w4a8_eagle3.engine.client import EngineClient
from kimi_w4a8_eagle3.engine.metrics import read_once
from kimi_w4a8_eagle3.engine.process import EngineServer
from kimi_w4a8_eagle3.ops import window
from kimi_w4a8_eagle3.ops.canary import Canary, CanaryPolicy
from kimi_w4a8_eagle3.ops.state import Phase
from kimi_w4a8_lab.accuracy.problems import parse_answer, problems
from proof.load.engine_loads import engine_loads

pytestmark = [pytest.mark.server, pytest.mark.slow]  # a server of two ranks

PLACES = ("PREFILL", "OUTPUT", "TAKE-IN", "BUILDING", "STOP-CHECK", "ANSWER")
POOL = 768  # tokens of the KV pool: two conversations, but not all their answers at once
# Requests are admitted as if they would not grow, so that they fill the pool and some must go again.
SMALL_POOL = ("disable-radix-cache=false", f"max-total-tokens={POOL}", "schedule-conservativeness=0.01")
DRAW = "int32"  # while this file exists, each sampled verify step fails
# More tokens than bad requests take, so that it still runs when they end.
LONG = {**QUESTION, "max_tokens": 40, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    folder = tmp_path_factory.mktemp("faulty")
    planted = f"env.KIMI_PLANTED_DRAW={folder / DRAW}"
    launch = tiny_launch(settings=(*TWO_RANKS, *SMALL_POOL, planted))
    yield from with_faults(launch, "support.planted_faults", folder)


@pytest.fixture(scope="module")
def right(faulty: EngineServer) -> str:
    """The answer without other requests."""
    return ask(faulty).json()["choices"][0]["message"]["content"]


def require_idle_and_whole(server: EngineServer) -> None:
    """All KV is free; SGLang checks its pools itself whenever it is idle, and ends when they do not add up."""
    until(lambda: not any(engine_loads(server.address, timeout_s=280).values()))
    assert httpx.get(f"{server.base_url}/health", headers=bearer(server.secret), timeout=280).status_code == 200
    assert psutil.Process(server.pid).is_running()


def spec_steps(server: EngineServer) -> float:
    return sum(window.spec_steps(read_once(*server.address)))


def test_two_ranks_solve_the_problems_with_eagle3(faulty: EngineServer) -> None:
    asked = problems(8, seed=4)
    before = spec_steps(faulty)
    with EngineClient(*faulty.address) as client:
        answers = client.chat_all([p.question for p in asked], 128, 4)
    expected = sum(sum(a.accepted_histogram) for a in answers)
    until(lambda: spec_steps(faulty) - before >= expected)  # an answer may arrive before it is counted
    solved = sum(parse_answer(a.text) == p.answer for a, p in zip(answers, asked, strict=True))
    assert solved >= 6
    assert sum(sum(a.accepted_histogram[1:]) for a in answers) > 0  # both ranks agree on accepted drafts
    assert spec_steps(faulty) - before == expected  # each step once, not once a rank


def test_two_ranks_draw_the_same_token(faulty: EngineServer) -> None:
    """Ranks that drew for themselves would part; a seed has one answer, alone and among others."""
    bodies = BODIES[::6]
    assert answers(faulty.address, bodies, 1) == answers(faulty.address, bodies, 8)


@pytest.mark.parametrize("place", PLACES)
def test_a_request_that_raises_ends_alone(faulty: EngineServer, right: str, place: str) -> None:
    """Streamed and not, beside one stream."""
    url = f"{faulty.base_url}/v1/chat/completions"
    with httpx.stream("POST", url, json=LONG, headers=bearer(faulty.secret), timeout=280) as healthy:
        lines = healthy.iter_lines()
        first = next(line for line in lines if '"content"' in line)
        whole, streamed = (ask(faulty, stop=[place], stream=stream, logprobs=True) for stream in (False, True))
        rest = list(lines)
    assert whole.status_code == 500
    assert streamed.status_code == 500 or '"error"' in streamed.text
    for bad in (whole, streamed):
        assert "TypeError" in bad.text
        assert "planted" not in bad.text  # what it was about stays in the log
    assert f'"completion_tokens":{LONG["max_tokens"]}' in "".join((first, *rest)).replace(" ", "")
    assert ask(faulty).json()["choices"][0]["message"]["content"] == right
    require_idle_and_whole(faulty)


@pytest.mark.parametrize("place", ["PREFILL", "DECODE"])
def test_a_request_that_raises_alone_in_an_idle_engine_ends_alone(faulty: EngineServer, right: str, place: str) -> None:
    require_idle_and_whole(faulty)
    assert ask(faulty, stop=[place]).status_code == 500
    assert ask(faulty).json()["choices"][0]["message"]["content"] == right
    require_idle_and_whole(faulty)


@pytest.mark.parametrize("place", ["DECODE", "READING"])
def test_where_the_guilty_one_is_unknown_its_batch_ends_and_the_next_is_right(
    faulty: EngineServer, right: str, place: str
) -> None:
    endless = {**LONG, "max_tokens": 600}  # it ends by the error, however slow the other client is
    url = f"{faulty.base_url}/v1/chat/completions"
    with httpx.stream("POST", url, json=endless, headers=bearer(faulty.secret), timeout=280) as beside:
        lines = beside.iter_lines()
        next(line for line in lines if '"content"' in line)
        bad = ask(faulty, stop=[place])
        rest = "".join(lines)
    assert bad.status_code == 500
    assert '"error"' in rest and "TypeError" in rest  # an error that its client sees, not a short answer
    assert ask(faulty).json()["choices"][0]["message"]["content"] == right
    require_idle_and_whole(faulty)


def test_sampled_verify_steps_that_always_fail_end_readiness_and_the_engine(
    faulty: EngineServer, right: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Prefills and greedy requests succeed all the while."""
    planted = next(tmp_path_factory.getbasetemp().glob("faulty*")) / DRAW
    state = engine_state(faulty.base_url)
    state.engine_secret = faulty.secret
    canary = Canary(state, CanaryPolicy(idle_s=0, retry_s=0))
    with EngineClient(*faulty.address) as client:
        for fields in startup_check.KINDS.values():  # none is refused, so the canary skips none
            assert client.chat("Count from one to five.", 8, **fields).token_ids
        planted.touch()
        with pytest.raises(KimiError, match=r"every sampled request fails inside the engine: .*ContractError"):
            startup_check.require_answers(client, 1)  # no engine becomes ready
        canary.step(None, time.time() + 1)
        assert (state.phase, state.broken) == (Phase.CHECKING, "") and "every sampled request" in state.reason
        assert ask(faulty).json()["choices"][0]["message"]["content"] == right
        canary.step(None, time.time() + 1)
        assert "every sampled request" in state.broken  # `supervision/supervisor.py` ends the engine
        counted = read_once(*faulty.address)
        # Three tries of two runs of the canary and of the start-up check, once each for all ranks.
        assert counted.total("kimi_failed_requests_total", place="verify", error="ContractError") == 9
        planted.unlink()
        canary.step(None, time.time() + 1)
        assert state.phase is Phase.READY
    require_idle_and_whole(faulty)


def until_grown(server: EngineServer, counter: str, by: float, act: Callable[[], object]) -> None:
    """Act until a counter of the server has grown by so much."""
    before = read_once(*server.address).total(counter) or 0.0
    until(lambda: act() is None and (read_once(*server.address).total(counter) or 0.0) >= before + by)


def test_the_prefix_cache_changes_no_token_and_speculation_costs_one_of_a_prompt(faulty: EngineServer) -> None:
    """Two turns cold, warm, after their prompts were evicted, and many times at once, so that some are retracted.

    EAGLE3's keys are pairs of tokens, so of a known prompt it computes the last token again and the one before.
    """
    first, second = problems(2, seed=15)
    before = [{"role": "user", "content": first.question}, {"role": "assistant", "content": first.solution}]
    turns = [before[:1], [*before, {"role": "user", "content": second.question}]]
    seeds = count()

    def answer(turn: list[dict[str, str]], **more: object) -> tuple[list[int], int, int]:
        """Return the tokens, and how many the prompt has and had in the cache."""
        said = ask(faulty, messages=turn, **{"max_tokens": 48, "return_token_ids": True, **more}).json()
        cached = (said["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        return said["choices"][0]["response_token_ids"], said["usage"]["prompt_tokens"], cached

    def evict() -> None:
        fill = " ".join(problem.question for problem in problems(12, seed=next(seeds)))
        answer([{"role": "user", "content": fill}], max_tokens=1)

    def crowd() -> None:
        with ThreadPoolExecutor(16) as pool:
            together.extend(pool.map(lambda turn: answer(turn, ignore_eos=True), turns * 8))

    assert flush_cache(faulty)
    cold, warm = [answer(turn) for turn in turns], [answer(turn) for turn in turns]
    until_grown(faulty, "sglang:evicted_tokens_total", POOL, evict)
    evicted, together = [answer(turn) for turn in turns], list[tuple[list[int], int, int]]()
    until_grown(faulty, "sglang:num_retracted_requests_total", 1, crowd)
    tokens = [ids for ids, *_ in cold]
    assert [ids for ids, *_ in warm] == [ids for ids, *_ in evicted] == tokens and min(map(len, tokens)) > 8
    assert [ids[: len(tokens[at % 2])] for at, (ids, *_) in enumerate(together)] == tokens * (len(together) // 2)
    assert [cached for *_, cached in warm] == [prompt - 2 for _, prompt, _ in warm]
    assert evicted[0][2] < warm[0][2]
    require_idle_and_whole(faulty)

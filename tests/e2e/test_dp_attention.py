"""DP attention with two groups of one rank each: exact answers, figures and isolation.

A request that raises where its group computes alone ends alone, while the other group serves. Only a pass that raises
would end the engine (`sglang_plugin/upkeep/failing_requests.py`). The faults are planted by `support.planted_faults`.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import psutil
import pytest
from support.sglang_program import VERSIONS, environment
from support.tiny_servers import TEXT, TWO_RANKS, ask, tiny_launch, with_faults
from support.waiting import until

from kimi_w4a8_eagle3.engine import startup_check
from kimi_w4a8_eagle3.engine.client import EngineClient
from kimi_w4a8_eagle3.engine.metrics import read_once
from kimi_w4a8_eagle3.engine.process import EngineServer
from kimi_w4a8_eagle3.ops.window import increase, spec_steps
from kimi_w4a8_lab.base.counters import Counters
from proof.load.engine_loads import RUNNING, engine_loads

pytestmark = [pytest.mark.server, pytest.mark.slow]

TWO_GROUPS = (*TWO_RANKS, "enable-dp-attention=true", "dp-size=2")
# So many tokens that it still runs when bad requests end.
LONG = {"max_tokens": 64, "ignore_eos": True}


@pytest.fixture(scope="module", params=VERSIONS)
def groups(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    launch = tiny_launch(settings=TWO_GROUPS)
    newest = environment(newest=request.param == VERSIONS[1])
    launch.env.update(PYTHONPATH=newest["PYTHONPATH"])
    yield from with_faults(launch, "support.planted_faults", tmp_path_factory.mktemp("groups"))


# Isolation on the newest release: test_newest_release.py.
PINNED = pytest.mark.parametrize("groups", VERSIONS[:1], indirect=True)


def content(response: httpx.Response) -> str:
    return str(response.json()["choices"][0]["message"]["content"])


def test_both_groups_answer_alike_and_are_counted_once(groups: EngineServer) -> None:
    with EngineClient(*groups.address) as client:
        before = read_once(*groups.address)
        answers = client.chat_all([TEXT] * 5, 32, 5)  # three for one group, so the other one's batches are padded
    assert len({answer.text for answer in answers}) == 1
    accepted = startup_check.acceptance_of(answers, 4)
    assert accepted is not None and accepted.length > 2
    expected = sum(sum(answer.accepted_histogram) for answer in answers)
    until(lambda: sum(increase(spec_steps(read_once(*groups.address)), spec_steps(before))) >= expected)
    reading = read_once(*groups.address)
    assert sum(increase(spec_steps(reading), spec_steps(before))) == expected
    assert Counters.of(reading).since(Counters.of(before)).requests == len(answers)
    assert set(reading.by("sglang:realtime_tokens_total", "dp_rank")) == {"0", "1"}
    assert len(reading.samples["kimi_page_guard_pool_tokens"]) == 2  # a pool of its own for each group


@PINNED
def test_a_request_that_raises_ends_alone_in_its_group(groups: EngineServer) -> None:
    right, right_soon = content(ask(groups, **LONG)), content(ask(groups))
    with ThreadPoolExecutor(4) as pool:
        for place in ("BUILDING", "STOP-CHECK", "READING"):
            # A batch ends as a whole while it is built or its results are read, so healthy requests run before.
            healthy = [pool.submit(ask, groups, **LONG) for _ in range(0 if place == "READING" else 2)]
            until(
                lambda asked=healthy: (
                    engine_loads(groups.address)[RUNNING] == len(asked) or all(one.done() for one in asked)
                )
            )
            bad = [pool.submit(ask, groups, stop=[place]) for _ in range(2)]  # one for each group
            assert [one.result().status_code for one in bad] == [500, 500]
            assert [content(one.result()) for one in healthy] == [right] * len(healthy)
    assert [content(ask(groups)) for _ in range(2)] == [right_soon] * 2  # both groups go on


@PINNED
def test_a_pass_that_raises_in_one_group_ends_the_engine(groups: EngineServer) -> None:
    """The other group waits for it inside the pass. The supervisor starts an engine that ended, not one that hangs."""
    process = psutil.Process(groups.pid)
    with suppress(httpx.TransportError):
        ask(groups, stop=["PREFILL"])
    process.wait(280)

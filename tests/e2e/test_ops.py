"""A real engine as its operator sees it: counters against the answers' own statistics, probes, canary, stacks."""

import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
import zmq
from support.engine_states import engine_state
from support.prometheus import needs_prometheus
from support.waiting import until

from kimi_w4a8_eagle3.base.http import Address, bearer
from kimi_w4a8_eagle3.base.prometheus import Reading, parse
from kimi_w4a8_eagle3.engine.client import EngineClient
from kimi_w4a8_eagle3.engine.fronted import FrontedEngine
from kimi_w4a8_eagle3.engine.metrics import acceptance_from_histograms
from kimi_w4a8_eagle3.engine.process import free_port
from kimi_w4a8_eagle3.engine.signs import DetokenizerQueue, EngineProcesses
from kimi_w4a8_eagle3.engine.watchdog import ask_for_stacks
from kimi_w4a8_eagle3.ops import window
from kimi_w4a8_eagle3.ops.canary import Canary, CanaryPolicy
from kimi_w4a8_eagle3.ops.endpoint import OpsServer
from kimi_w4a8_eagle3.ops.state import EngineState, Phase
from kimi_w4a8_lab.accuracy.problems import problems
from kimi_w4a8_lab.base import counters

pytestmark = pytest.mark.server


@pytest.fixture
def state(eagle3: FrontedEngine) -> EngineState:
    found = engine_state(eagle3.base_url)
    found.engine_url, found.engine_secret = eagle3.address
    return found


@pytest.fixture
def ops(state: EngineState) -> Iterator[OpsServer]:
    with OpsServer("127.0.0.1", free_port(), state, sample_interval_s=0.2, scrape_timeout_s=30) as server:
        yield server


def scrape(base_url: str, key: str | None = None) -> str:
    answer = httpx.get(f"{base_url}/metrics", headers=bearer(key), follow_redirects=True, timeout=30)
    return answer.raise_for_status().text


def spec_steps(engine: Address) -> tuple[float, ...]:
    return window.spec_steps(Reading.parse(scrape(*engine)))


def ask(client: EngineClient, seed: int) -> list[tuple[int, ...]]:
    questions = [p.question for p in problems(12, seed=seed)]
    return [answer.accepted_histogram for answer in client.chat_all(questions, 64, 4)]


def test_the_engine_counts_exactly_what_its_answers_say(eagle3, client, ops):
    before = spec_steps(eagle3.address)
    assert len(before) == 4
    histograms = ask(client, seed=31)
    expected = [sum(h[k] for h in histograms if k < len(h)) for k in range(4)]
    until(lambda: sum(spec_steps(eagle3.address)) >= sum(before) + sum(expected))  # answers may come before
    after = spec_steps(eagle3.address)
    assert [late - early for late, early in zip(after, before, strict=True)] == expected
    assert sum(after) == Reading.parse(scrape(*eagle3.address)).total("sglang:spec_verify_calls_total")


def test_the_last_minute_is_what_the_answers_say(client, ops):
    expected = acceptance_from_histograms(ask(client, seed=32), 4)
    until(lambda: ops.acceptance() == expected)
    reading = Reading.parse(scrape(ops.base_url))
    assert reading.total("kimi_accept_length") == pytest.approx(expected.length)
    shares = [reading.total("kimi_accept_rate", position=position) for position in "123"]
    assert shares == pytest.approx(list(expected.per_position))


def test_the_merged_exposition_has_the_engines(eagle3, ops):
    engine, merged = parse(scrape(*eagle3.address)), Reading.parse(scrape(ops.base_url))
    for name in ("sglang:generation_tokens_total", "sglang:e2e_request_latency_seconds_count"):
        assert merged.total(name) == Reading.of(engine).total(name)
    assert {f.name for f in engine} <= {f.name for f in parse(scrape(ops.base_url))}
    assert merged.labels("kimi_moe_backend_info", "backend") == ("reference",)
    assert merged.total("kimi_page_guard_pool_tokens") == merged.total("sglang:max_total_num_tokens")
    assert "kimi_page_guard_cap_tokens" not in merged.samples  # this attention backend has no such limit


@needs_prometheus
def test_promtool_reads_the_merged_exposition(ops):
    text = scrape(ops.base_url)
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 3), done.stderr  # 1: not readable; 3: it dislikes a name, as those of SGLang
    assert not [line for line in (done.stdout + done.stderr).splitlines() if "kimi_" in line]


def test_a_collapse_on_the_canary_makes_it_not_ready_until_it_recovers(eagle3, state, ops):
    """The draft is fine, so the floor is moved instead: above the longest possible step, and back."""

    def canary(floor: float) -> Canary:
        return Canary(state, CanaryPolicy(floor=floor, idle_s=0, retry_s=0))

    watch = canary(floor=4.5)
    watch.step(None, state.since + 1)
    assert state.phase is Phase.CHECKING and "it must be above" in state.reason
    assert 1.5 < state.canary.length < 4.5
    answer = httpx.get(f"{ops.base_url}/ready")
    assert answer.status_code == 503 and "accept length" in answer.json()["reason"]
    watch.step(None, state.since + 2)
    assert state.phase is Phase.CHECKING
    watch._policy = CanaryPolicy(floor=1.0, idle_s=0, retry_s=0)
    watch.step(None, state.since + 3)
    assert state.phase is Phase.READY and httpx.get(f"{ops.base_url}/ready").status_code == 200
    state.enter(Phase.CHECKING, "start-up check")  # somebody else's
    canary(floor=1.0).step(None, state.since + 4)
    assert state.phase is Phase.CHECKING


def test_a_benchmark_does_not_take_the_canary_for_another_client(eagle3, client, state):
    before = counters.still(eagle3.address)
    Canary(state, CanaryPolicy(idle_s=0)).step(None, state.since + 1)
    assert state.canary is not None
    client.chat("Tom has 3 apples", 4)  # counted after the canary's, if those were
    assert counters.counted(eagle3.address, before.requests + 1, 30).since(before).requests == 1


def test_every_process_of_the_engine_prints_its_stacks_and_goes_on(eagle3: FrontedEngine, client: EngineClient) -> None:
    before = eagle3.log_path.stat().st_size
    asked = ask_for_stacks(eagle3.pid)
    assert asked >= 3  # HTTP server, scheduler, detokenizer

    def printed() -> int:
        return eagle3.log_path.read_bytes()[before:].count(b"Current thread 0x")

    until(lambda: printed() >= asked)
    assert printed() == asked
    assert client.generate("Tom has 3 apples", max_new_tokens=4).text


# Evaluated by the detokenizer, which unpickles it: a loop that spins until there is a file, and then a request.
SPINS = "(any(iter(lambda: {os}.path.exists({file!r}), True)), {io}.FreezeGCReq())[1]"
MODULE = "__import__({!r}, fromlist=['_'])"


class Spin:
    def __init__(self, file: Path) -> None:
        self.text = SPINS.format(
            os=MODULE.format("os"), io=MODULE.format("sglang.srt.managers.io_struct"), file=str(file)
        )

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, (self.text,)


def test_a_detokenizer_that_spins_over_its_work_is_seen_by_its_neighbours(eagle3, client, tmp_path: Path) -> None:
    client.chat("Tom has 3 apples", 4)
    family = psutil.Process(eagle3.pid).children(recursive=True)
    (detokenizer,) = (process for process in family if "sglang::detokenizer" in process.cmdline()[0])
    (address,) = {found.laddr for found in detokenizer.net_connections("unix") if str(found.laddr).startswith("/")}
    queue, processes = DetokenizerQueue(eagle3.engine.folder), EngineProcesses(eagle3.pid)
    assert queue.age(time.monotonic()) == 0.0
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket, ThreadPoolExecutor(1) as thread:
        socket.connect(f"ipc://{address}")
        socket.send_pyobj(Spin(tmp_path / "end"))
        try:
            before = detokenizer.cpu_times().user
            until(lambda: detokenizer.cpu_times().user > before + 1)
            asked = thread.submit(client.chat, "Tom has 4 apples", 4)
            until(lambda: queue.age(time.monotonic()) > 3)
            assert processes.lost() is processes.stopped() is None  # nothing else shows it
        finally:
            (tmp_path / "end").touch()
        assert asked.result().token_ids
    until(lambda: queue.age(time.monotonic()) == 0)


def test_a_rank_has_one_thread_that_waits_for_others(eagle3: FrontedEngine) -> None:
    family = psutil.Process(eagle3.pid).children(recursive=True)
    (scheduler,) = (process.pid for process in family if "sglang::scheduler" in process.cmdline()[0])
    names = [name.read_text() for name in Path(f"/proc/{scheduler}/task").glob("*/comm")]
    assert names.count("gloo_tcp_loop\n") == 1

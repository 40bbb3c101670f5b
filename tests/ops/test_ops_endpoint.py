"""The ops endpoint over real exporters on loopback: probes, one exposition, and processes that do not answer."""

import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
from support.engine_states import engine_state
from support.prometheus import needs_prometheus
from support.waiting import until

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.prometheus import Reading
from kimi_w4a8_eagle3.engine.metrics import Acceptance
from kimi_w4a8_eagle3.engine.process import free_port
from kimi_w4a8_eagle3.ops.endpoint import OpsServer
from kimi_w4a8_eagle3.ops.state import EngineState, Phase
from kimi_w4a8_eagle3.ops.window import ACCEPTANCE_SPAN_S, SPAN_S


class Exporter:
    """Stands in for an engine's /metrics: prometheus_client's HTTP server with the counters used here."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.steps = Counter("kimi_spec_steps", "Verify steps.", ["accepted"], registry=registry)
        for accepted in "0123":
            self.steps.labels(accepted)
        Gauge("sglang:num_running_reqs", "Running.", registry=registry).set(2)
        port = free_port()
        self.base_url = f"http://127.0.0.1:{port}"
        self._server, self._thread = start_http_server(port, "127.0.0.1", registry)

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    made = Exporter()
    yield made
    made.stop()


@pytest.fixture
def mute() -> Iterator[str]:
    """A process that accepts connections and never answers: an engine that was stopped."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def serve(state: EngineState, scrape_timeout_s: float = 30.0) -> OpsServer:
    return OpsServer("127.0.0.1", free_port(), state, sample_interval_s=0.05, scrape_timeout_s=scrape_timeout_s)


def reading(ops: OpsServer) -> Reading:
    return Reading.parse(httpx.get(f"{ops.base_url}/metrics", timeout=30).text)


NOWHERE = "http://127.0.0.1:1"


def test_ready_follows_the_phases_and_says_why_not() -> None:
    state = engine_state(NOWHERE, Phase.STARTING, "weights are loaded")
    with serve(state) as ops:
        for name, status in (("page.example:9528", 400), ("localhost", 503), ("[::1]:9528", 503)):
            assert httpx.get(f"{ops.base_url}/ready", headers={"Host": name}).status_code == status
        answer = httpx.get(f"{ops.base_url}/ready")
        assert (answer.status_code, answer.json()) == (
            503, {"ready": False, "phase": "starting", "reason": "weights are loaded"}
        )  # fmt: skip
        for phase in Phase:
            state.enter(phase)
            assert httpx.get(f"{ops.base_url}/ready").status_code == (200 if phase is Phase.READY else 503)
            assert httpx.get(f"{ops.base_url}/live").status_code == 200


def test_one_exposition_has_the_engine_and_ours(exporter: Exporter) -> None:
    state = engine_state(exporter.base_url)
    state.enter(Phase.STARTING)
    time.sleep(0.01)
    state.enter(Phase.READY)
    state.restarts["stalled"] += 2
    state.stalls, state.canary, state.canary_at = 3, Acceptance(3.5, 0.8, 40), 1234.5
    exporter.steps.labels("3").inc(5)
    with serve(state) as ops:
        assert reading(ops).total("kimi_seconds_since_progress") is None
        state.progressed(time.monotonic() - 7)
        found = reading(ops)
    assert found.total("kimi_spec_steps_total", accepted="3") == 5 and found.total("sglang:num_running_reqs") == 2
    assert found.total("kimi_engine_restarts_total", reason="stalled") == 2
    assert found.total("kimi_engine_start_time_seconds") == pytest.approx(state.history[0][0], abs=1e-4)
    assert found.total("kimi_watchdog_stalls_total") == 3 and found.total("kimi_engine_up") == 1
    assert found.total("kimi_canary_accept_length") == 3.5 and found.total("kimi_canary_timestamp_seconds") == 1234.5
    assert 7 <= found.total("kimi_seconds_since_progress") < 280
    assert found.total("kimi_engine_phase") == 1 and found.total("kimi_build_info", recipe="tiny") == 1


@needs_prometheus
def test_promtool_has_nothing_to_say_about_our_metrics(exporter: Exporter) -> None:
    state = engine_state(exporter.base_url)
    state.restarts["ended"] += 1
    with serve(state) as ops:
        text = httpx.get(f"{ops.base_url}/metrics").text
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    complaints = [line for line in (done.stdout + done.stderr).splitlines() if "kimi_" in line]
    assert done.returncode in (0, 3) and not complaints  # 3: the colons in SGLang's own names


def test_the_window_shows_what_was_counted_while_it_watched(exporter: Exporter) -> None:
    exporter.steps.labels("0").inc(1000)  # before the endpoint watched
    with serve(engine_state(exporter.base_url)) as ops:
        assert reading(ops).total("kimi_accept_length") is None
        exporter.steps.labels("3").inc(6)
        exporter.steps.labels("1").inc(2)
        until(lambda: ops.acceptance() == Acceptance(1 + 20 / 8, 20 / 24, 8, (1.0, 0.75, 0.75)))
        found = reading(ops)
    assert found.total("kimi_accept_length") == 3.5
    assert [found.total("kimi_accept_rate", position=p) for p in "123"] == [1.0, 0.75, 0.75]


def test_a_silent_engine_blocks_nothing_and_no_exposition_is_no_answer(mute: str) -> None:
    with serve(engine_state(mute), scrape_timeout_s=2.0) as silent:
        found = reading(silent)  # without the time limit it would wait for ever
        assert httpx.get(f"{silent.base_url}/ready").status_code == 200
        assert found.total("kimi_engine_up") == 0 and found.total("kimi_engine_phase", phase="ready") == 1
        with serve(engine_state(f"{silent.base_url}/live?x=")) as other:  # which is JSON
            assert reading(other).total("kimi_engine_up") == 0


def test_status_and_the_live_page_show_the_figures(exporter: Exporter) -> None:
    state = engine_state(exporter.base_url)
    with serve(state) as ops:
        status = httpx.get(f"{ops.base_url}/status").json()
        page = httpx.get(f"{ops.base_url}/")
        state.restarts["renewed"] += 1
        state.enter(Phase.DOWN, "it went away")
        gone = httpx.get(f"{ops.base_url}/status").json()
    assert page.text.count(f"last {SPAN_S:.0f} s") == 2 and f"{ACCEPTANCE_SPAN_S:.0f} s" in page.text
    whole = {"recipe": "tiny", "ready": True, "phase": "ready", "canary": None, "acceptance": None}
    assert whole.items() <= status.items() and status["figures"]["running"] == 2
    assert (gone["phase"], gone["figures"], gone["restarts"]["renewed"]) == ("down", None, 1)
    assert gone["history"][-1]["reason"] == "it went away" and isinstance(status["gpus"], list)
    assert page.headers["content-type"].startswith("text/html")
    assert (
        'status.ready ? "good" : ["down", "stalled"].includes(status.phase) ? "bad" : ""' in page.text
    )  # no red start
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(r"https?://|innerHTML|//cdn", page.text)  # one file, and values are never markup


def test_a_taken_port_is_an_error_and_stop_frees_the_port() -> None:
    state = engine_state(NOWHERE)
    before = threading.active_count()
    with serve(state) as ops:
        with pytest.raises(KimiError, match="cannot be used: Address already in use") as refused:
            OpsServer("127.0.0.1", ops.port, state).start()
        assert refused.value.where == "--ops-port"
    with OpsServer("127.0.0.1", ops.port, state) as again:
        assert httpx.get(f"{again.base_url}/live").status_code == 200
    again.stop()  # a second time
    assert threading.active_count() == before


def test_nothing_can_be_changed_through_the_ops_port() -> None:
    with serve(engine_state(NOWHERE), scrape_timeout_s=0.5) as ops:
        for path in ("/", "/live", "/ready", "/metrics", "/status"):
            for method in ("POST", "PUT", "PATCH", "DELETE"):
                answer = httpx.request(method, f"{ops.base_url}{path}")
                assert (answer.status_code, sorted(answer.headers["allow"].split(", "))) == (405, ["GET", "HEAD"])
        assert httpx.get(f"{ops.base_url}/flush_cache").status_code == 404

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
from support.fleet_views import HandmadeFleet, replica
from support.prometheus import needs_prometheus
from support.waiting import until

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.prometheus import Reading
from kimi_w4a8_eagle3.engine.metrics import Acceptance
from kimi_w4a8_eagle3.engine.process import free_port
from kimi_w4a8_eagle3.ops.endpoint import OpsServer
from kimi_w4a8_eagle3.ops.replica_state import Phase
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
def exporters() -> Iterator[list[Exporter]]:
    made = [Exporter(), Exporter()]
    yield made
    for exporter in made:
        exporter.stop()


@pytest.fixture
def mute() -> Iterator[str]:
    """A process that accepts connections and never answers: an engine that was stopped."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def serve(fleet: HandmadeFleet, scrape_timeout_s: float = 30.0) -> OpsServer:
    return OpsServer("127.0.0.1", free_port(), fleet, sample_interval_s=0.05, scrape_timeout_s=scrape_timeout_s)


def reading(ops: OpsServer) -> Reading:
    return Reading.parse(httpx.get(f"{ops.base_url}/metrics", timeout=30).text)


def test_ready_follows_the_phases_and_says_why_not() -> None:
    fleet = HandmadeFleet([replica("0", "http://127.0.0.1:1", Phase.STARTING, "weights are loaded")])
    with serve(fleet) as ops:
        for name, status in (("page.example:9528", 400), ("localhost", 503), ("[::1]:9528", 503)):
            assert httpx.get(f"{ops.base_url}/ready", headers={"Host": name}).status_code == status
        answer = httpx.get(f"{ops.base_url}/ready")
        assert (answer.status_code, answer.json()) == (
            503, {"ready": False, "phase": "starting", "reason": "weights are loaded"}
        )  # fmt: skip
        for phase in Phase:
            fleet.states[0].enter(phase)
            assert httpx.get(f"{ops.base_url}/ready").status_code == (200 if phase is Phase.READY else 503)
        fleet.states.append(replica("1", "http://127.0.0.1:1", Phase.CHECKING, "canary prompts"))
        answer = httpx.get(f"{ops.base_url}/ready").json()
        assert answer["phase"] == "checking" and "1: checking, canary prompts" in answer["reason"]
        fleet.states[1].enter(Phase.READY)
        assert httpx.get(f"{ops.base_url}/ready").status_code == 200
        fleet.states.clear()
        assert httpx.get(f"{ops.base_url}/ready").status_code == 503


def test_live_comes_from_the_supervisor() -> None:
    fleet = HandmadeFleet([replica("0", "http://127.0.0.1:1", Phase.STARTING)])
    with serve(fleet) as ops:
        assert httpx.get(f"{ops.base_url}/live").status_code == 200
        fleet.alive = (False, "no token for 120 s")
        answer = httpx.get(f"{ops.base_url}/live")
        assert (answer.status_code, answer.json()["reason"]) == (503, "no token for 120 s")


def test_one_exposition_has_every_replica_router_and_ours(exporters: list[Exporter]) -> None:
    fleet = HandmadeFleet([replica(str(i), e.base_url) for i, e in enumerate(exporters)])
    fleet.router_metrics_url = f"{exporters[0].base_url}/metrics"  # any exposition serves for the router's
    state = fleet.states[0]
    state.restarts["stalled"] += 2
    state.stalls, state.canary, state.canary_at = 3, Acceptance(3.5, 0.8, 40), 1234.5
    state.progressed(time.monotonic() - 7)
    exporters[1].steps.labels("3").inc(5)
    with serve(fleet) as ops:
        found = reading(ops)
    assert found.total("kimi_spec_steps_total", replica="1", accepted="3") == 5
    assert {s.labels.get("replica") for s in found.samples["sglang:num_running_reqs"]} == {"0", "1", None}
    assert found.total("kimi_replica_restarts_total", replica="0", reason="stalled") == 2
    assert found.total("kimi_watchdog_stalls_total", replica="0") == 3
    assert found.total("kimi_canary_accept_length") == 3.5 and found.total("kimi_canary_timestamp_seconds") == 1234.5
    assert 7 <= found.total("kimi_seconds_since_progress", replica="0") < 280
    assert found.total("kimi_seconds_since_progress", replica="1") is None
    assert found.total("kimi_replica_phase", replica="0") == 1 and found.total("kimi_build_info", recipe="tiny") == 1


@needs_prometheus
def test_promtool_has_nothing_to_say_about_our_metrics(exporters: list[Exporter]) -> None:
    fleet = HandmadeFleet([replica("0", exporters[0].base_url)])
    fleet.states[0].restarts["ended"] += 1
    with serve(fleet) as ops:
        text = httpx.get(f"{ops.base_url}/metrics").text
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    complaints = [line for line in (done.stdout + done.stderr).splitlines() if "kimi_" in line]
    assert done.returncode in (0, 3) and not complaints  # 3: the colons in SGLang's own names


def test_the_window_shows_what_was_counted_while_it_watched(exporters: list[Exporter]) -> None:
    exporters[0].steps.labels("0").inc(1000)  # before the endpoint watched
    fleet = HandmadeFleet([replica("0", exporters[0].base_url)])
    with serve(fleet) as ops:
        assert reading(ops).total("kimi_accept_length") is None
        exporters[0].steps.labels("3").inc(6)
        exporters[0].steps.labels("1").inc(2)
        until(lambda: ops.acceptance("0") == Acceptance(1 + 20 / 8, 20 / 24, 8, (1.0, 0.75, 0.75)))
        found = reading(ops)
    assert found.total("kimi_accept_length", replica="0") == 3.5
    assert [found.total("kimi_accept_rate", position=p) for p in "123"] == [1.0, 0.75, 0.75]


def test_a_silent_replica_neither_blocks_nor_breaks_the_others(exporters: list[Exporter], mute: str) -> None:
    fleet = HandmadeFleet(
        [replica("0", exporters[0].base_url), replica("1", mute), replica("2", "http://127.0.0.1:1", Phase.DOWN)]
    )
    fleet.router_metrics_url = f"{mute}/metrics"
    with serve(fleet, scrape_timeout_s=2.0) as ops:
        found = reading(ops)  # without the time limit it would wait for ever
        assert httpx.get(f"{ops.base_url}/ready").status_code == 200
    assert [found.total("kimi_replica_up", replica=r) for r in "012"] == [1, 0, 0]
    assert found.total("kimi_replica_phase", replica="2", phase="down") == 1
    assert found.total("sglang:num_running_reqs") == 2


def test_what_is_no_exposition_counts_as_no_answer(exporters: list[Exporter]) -> None:
    with serve(HandmadeFleet([])) as page:  # its /live is JSON
        fleet = HandmadeFleet([replica("0", f"{page.base_url}/live?x="), replica("1", exporters[1].base_url)])
        with serve(fleet) as ops:
            found = reading(ops)
    assert [found.total("kimi_replica_up", replica=r) for r in "01"] == [0, 1]


def test_status_and_the_live_page_show_the_figures(exporters: list[Exporter]) -> None:
    url = exporters[0].base_url  # of the second, too, so that there are figures of the time before it went
    fleet = HandmadeFleet([replica("0", url), replica("1", url, Phase.DOWN, "it went away")], router_url="http://r")
    fleet.states[1].restarts["rolling"] += 1
    with serve(fleet) as ops:
        status = httpx.get(f"{ops.base_url}/status").json()
        page = httpx.get(f"{ops.base_url}/")
    assert page.text.count(f"{SPAN_S:.0f} s") == 3 and f"{ACCEPTANCE_SPAN_S:.0f} s" in page.text
    whole = {"recipe": "tiny", "ready": True, "live": True, "live_reason": "", "router_url": "http://r"}
    assert whole.items() <= status.items()
    alive, gone = status["replicas"]
    assert alive["canary"] is None and alive["acceptance"] is None
    assert (alive["name"], alive["phase"], alive["figures"]["running"]) == ("0", "ready", 2)
    assert (gone["name"], gone["phase"], gone["figures"], gone["restarts"]["rolling"]) == ("1", "down", None, 1)
    assert gone["history"][-1]["reason"] == "it went away" and isinstance(status["gpus"], list)
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(r"https?://|innerHTML|//cdn", page.text)  # one file, and values are never markup


def test_a_taken_port_is_an_error_and_stop_frees_the_port() -> None:
    fleet = HandmadeFleet([])
    before = threading.active_count()
    with serve(fleet) as ops:
        with pytest.raises(KimiError, match="cannot be used: Address already in use") as refused:
            OpsServer("127.0.0.1", ops.port, fleet).start()
        assert refused.value.where == "--ops-port"
    with OpsServer("127.0.0.1", ops.port, fleet) as again:
        assert httpx.get(f"{again.base_url}/live").status_code == 200
    again.stop()  # a second time
    assert threading.active_count() == before


def test_nothing_can_be_changed_through_the_ops_port() -> None:
    with serve(HandmadeFleet([]), scrape_timeout_s=0.5) as ops:
        for path in ("/", "/live", "/ready", "/metrics", "/status"):
            for method in ("POST", "PUT", "PATCH", "DELETE"):
                answer = httpx.request(method, f"{ops.base_url}{path}")
                assert (answer.status_code, sorted(answer.headers["allow"].split(", "))) == (405, ["GET", "HEAD"])
        assert httpx.get(f"{ops.base_url}/flush_cache").status_code == 404

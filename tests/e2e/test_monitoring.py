"""A real Prometheus over a real engine behind the real smg: the dashboard's panels have data, the rules agree."""

import json
import time
from collections.abc import Iterator

import pytest
from support.dashboards import DASHBOARD, filled, panels
from support.engine_states import engine_state
from support.prometheus import Prometheus, installed, prometheus
from support.waiting import until

from kimi_w4a8_eagle3.engine.fronted import FrontedEngine
from kimi_w4a8_eagle3.engine.process import free_port
from kimi_w4a8_eagle3.ops.endpoint import OpsServer
from kimi_w4a8_eagle3.ops.state import EngineState
from kimi_w4a8_lab.accuracy.problems import problems
from kimi_w4a8_lab.accuracy.tokens import TokenClient
from proof.load.behind_smg import Smg, smg

pytestmark = [pytest.mark.server, pytest.mark.slow, installed]

BOARD = json.loads(DASHBOARD.read_text())
# docs/runbook.md names them too: no data on a healthy CPU server, whose recipe has no prefix cache.
NEEDS_AN_EVENT = {"Retries and errors", "Prompts found in the prefix cache"}
NEEDS_THE_GUARD = {"Page-guard head-room"}  # it acts where attention is AITER's, or with KIMI_PAGE_GUARD=force
NEEDS_A_GPU = {"GPU memory used", "GPU power", "GPU temperature", "GPU activity"}


@pytest.fixture(scope="module")
def front(eagle3: FrontedEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Smg]:
    with smg(tmp_path_factory.mktemp("smg"), ["--worker-urls", eagle3.base_url]) as found:
        found.wait_healthy(lambda urls: urls == {eagle3.base_url})
        yield found


@pytest.fixture(scope="module")
def state(eagle3: FrontedEngine) -> EngineState:
    found = engine_state(eagle3.base_url)
    found.engine_url, found.engine_secret = eagle3.address
    found.last_progress = time.monotonic()
    return found


def stream(client: TokenClient, question: str) -> None:
    list(client.stream({"messages": [{"role": "user", "content": question}], "max_tokens": 48}))


@pytest.fixture(scope="module")
def served(state: EngineState, front: Smg, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus after questions, streamed and not, before and after it saw the counters for the first time."""
    questions = [problem.question for problem in problems(8, seed=77)]
    with (
        OpsServer("127.0.0.1", free_port(), state, sample_interval_s=0.5) as ops,
        TokenClient(front.base_url) as client,
        prometheus(ops.base_url, tmp_path_factory.mktemp("prometheus"), front.metrics_url) as found,
    ):
        client.chat_all(questions[:2], 48, 2)
        stream(client, questions[2])
        until(lambda: bool(found.query("smg_router_requests_total")), 60)
        client.chat_all(questions[3:6], 48, 2)
        for question in questions[6:]:
            stream(client, question)
        until(lambda: bool(found.query("kimi:accept_length:rate5m")), 60)
        yield found


def without_data(server: Prometheus) -> set[str]:
    return {
        panel["title"]
        for panel in panels(BOARD)
        if not any(server.history(filled(target["expr"], "30s")) for target in panel["targets"])
    }


def test_every_panel_has_data_but_those_that_need_an_event(served: Prometheus) -> None:
    expected = NEEDS_AN_EVENT | NEEDS_THE_GUARD | NEEDS_A_GPU
    assert expected < {panel["title"] for panel in panels(BOARD)}
    until(lambda: without_data(served) <= expected, 60, lambda: without_data(served))


def test_the_rules_compute_the_accept_length_that_the_samples_give(served: Prometheus) -> None:
    """rate() adds up to half the time between two samples at the start, less where a counter would be below zero."""
    samples = served.query("kimi_spec_steps_total[5m]")
    steps = {int(s["metric"]["accepted"]): float(s["values"][-1][1]) - float(s["values"][0][1]) for s in samples}
    assert set(steps) == {0, 1, 2, 3} and sum(steps.values()) > 20
    near = 0.5 / (min(len(s["values"]) for s in samples) - 1)
    length = 1 + sum(accepted * count for accepted, count in steps.items()) / sum(steps.values())
    assert served.value("kimi:accept_length:rate5m") == pytest.approx(length, rel=near)
    (stat,) = (panel for panel in panels(BOARD) if panel["title"] == "Accept length, now")
    assert served.value(filled(stat["targets"][0]["expr"])) == pytest.approx(length, rel=near)
    at_least = [sum(count for accepted, count in steps.items() if accepted >= k) for k in (1, 2, 3)]
    for position, count in enumerate(at_least, start=1):
        rate = served.value(f'kimi:accept_rate:rate5m{{position="{position}"}}')
        assert rate == pytest.approx(count / sum(steps.values()), rel=near)


def test_a_healthy_server_fires_nothing_and_has_its_objectives(served: Prometheus) -> None:
    until(lambda: bool(served.query("kimi:instance_objective_tpot_p50_seconds{recipe='tiny'}")), 60)
    assert not served.query('ALERTS{alertname=~"Kimi.*", alertstate="firing"}')
    assert served.value("kimi:router_error_ratio:rate5m") == 0


def test_objectives_lie_on_edges_of_the_servers_own_buckets(served: Prometheus) -> None:
    """Only there is "the median is above" counted; between two edges it is interpolated."""
    for metric, objective in (
        ("sglang:request_time_per_output_token_seconds_bucket", "kimi:objective_tpot_p50_seconds"),
        ("sglang:time_to_first_token_seconds_bucket", "kimi:objective_ttft_p50_seconds"),
    ):
        edges = {float(series["metric"]["le"]) for series in served.query(f"group by (le) ({metric})")}
        assert {float(series["value"][1]) for series in served.query(objective)} <= edges


def test_a_restart_is_an_annotation(served: Prometheus, state: EngineState) -> None:
    (restarts,) = (filled(one["expr"]) for one in BOARD["annotations"]["list"] if one["name"] == "Restarts")
    assert not served.query(restarts)
    state.restarts["ended"] += 1
    until(lambda: bool(served.query(restarts)), 60)
    (series,) = served.query(restarts)
    assert (series["metric"]["reason"], series["value"][1]) == ("ended", "1")
    (last_hour,) = (panel for panel in panels(BOARD) if panel["title"] == "Restarts, last hour")
    assert served.value(filled(last_hour["targets"][0]["expr"])) == 1

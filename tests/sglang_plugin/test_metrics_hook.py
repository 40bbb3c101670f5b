"""Our metrics inside SGLang's process: the counter counts correctly.

What a real engine then shows is checked in tests/e2e/test_ops.py.
"""

import logging
from functools import partial
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram
from support.sglang_program import BOTH, VERSIONS, found

from kimi_w4a8_eagle3.engine.given_folder import UNCOUNTED
from kimi_w4a8_eagle3.sglang_plugin.upkeep.metrics_hook import count_clients, define_request_metrics, emit_constants


@BOTH
def test_the_plugin_imports_no_prometheus_client_before_the_engine_has_named_the_shared_folder(newest: bool) -> None:
    program = 'import json, sglang, sys\nprint(json.dumps([sglang.__version__, "prometheus_client" in sys.modules]))'
    assert found(program, newest) == [VERSIONS[newest], False]


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def collector(registry: CollectorRegistry) -> SimpleNamespace:
    """The tokenizer's collector of 0.5.20 after our hook, with 4 draft tokens."""
    buckets = SimpleNamespace(_upper_bounds=[0.1, 1.0])
    found = SimpleNamespace(labels={"model_name": "m"}, histogram_inter_token_latency=buckets)
    found._counter_cls = partial(Counter, registry=registry)
    found._histogram_cls = partial(Histogram, registry=registry)
    define_request_metrics(None, found, SimpleNamespace(speculative_num_draft_tokens=4))
    return found


@pytest.mark.usefixtures("collector")
def test_the_access_log_has_the_requests_of_clients_and_failed_scrapes(caplog: pytest.LogCaptureFixture) -> None:
    scrapes = [("GET", "/metrics", 200), ("GET", "/health", 200), ("GET", "/metrics", 503)]
    access = logging.getLogger("uvicorn.access")
    with caplog.at_level(logging.INFO, "uvicorn.access"):
        for method, path, status in [("POST", "/v1/completions", 200), *scrapes]:
            access.info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:1", method, path, "1.1", status)
    assert [record.args[1:5:3] for record in caplog.records] == [("POST", 200), ("GET", 503)]


def count(collector: SimpleNamespace, finished: bool = True, rid: str = "a", **output: list | None) -> list[int]:
    """Count the second request of a batch, which streamed and decoded for two seconds; return what SGLang counted."""
    state = SimpleNamespace(finished=finished, obj=SimpleNamespace(stream=True, rid=rid))
    state.time_stats = SimpleNamespace(get_decode_latency=lambda: 2.0)
    ended = {"completion_tokens": [9, 5], "finished_reasons": [None, {"type": "stop"}], **output}
    counted: list[int] = []
    manager, batch = SimpleNamespace(metrics_collector=collector), SimpleNamespace(**ended)
    count_clients(lambda *call: counted.append(call[-1]), manager, state, batch, 1)
    return counted


@pytest.mark.parametrize(("rid", "steps"), [("a", 2), (f"{UNCOUNTED}1", 0)], ids=["client", "canary"])
def test_the_canary_is_in_no_metric_of_requests(
    collector: SimpleNamespace, registry: CollectorRegistry, rid: str, steps: int
) -> None:
    assert count(collector, rid=rid, spec_correct_drafts_histogram=[[9], [1, 2]]) == [1] * (steps > 0)
    assert registry.get_sample_value("kimi_spec_steps_total", {"model_name": "m", "accepted": "1"}) == steps


@pytest.mark.parametrize(
    ("finished", "histograms", "expected"),
    [
        (True, [[9], [1, 2]], [1, 2, 0, 0, None]),
        (True, [[9], [0, 0, 0, 0, 5]], [0, 0, 0, 0, 5]),
        (False, [[9], [1, 2]], [0, 0, 0, 0, None]),
        (True, [[9]], [0, 0, 0, 0, None]),
        (True, [[9], []], [0, 0, 0, 0, None]),
        (True, None, [0, 0, 0, 0, None]),
    ],
    ids=["finished", "longer", "running", "short-list", "no-steps", "no-speculation"],
)
def test_series_begin_at_zero_and_grow_by_a_finished_requests_own_histogram(
    collector: SimpleNamespace, registry: CollectorRegistry, finished: bool, histograms: list | None, expected: list
) -> None:
    count(collector, finished, spec_correct_drafts_histogram=histograms)
    labels = [{"model_name": "m", "accepted": str(accepted)} for accepted in range(5)]
    assert [registry.get_sample_value("kimi_spec_steps_total", series) for series in labels] == expected


@pytest.mark.parametrize(
    ("finished", "tokens", "reason", "expected"),
    [
        (True, 5, {"type": "stop"}, 0.5),
        (True, 5, {"type": "length"}, 0.5),
        (True, 5, {"type": "abort"}, None),
        (True, 1, {"type": "stop"}, None),
        (False, 5, None, None),
    ],
    ids=["stop", "length", "aborted", "one-token", "running"],
)
def test_only_a_whole_answer_of_two_tokens_or_more_has_a_time_per_token(
    collector: SimpleNamespace,
    registry: CollectorRegistry,
    finished: bool,
    tokens: int,
    reason: dict | None,
    expected: float | None,
) -> None:
    count(collector, finished, completion_tokens=[9, tokens], finished_reasons=[None, reason])
    name, labels = "sglang:request_time_per_output_token_seconds_sum", {"model_name": "m", "is_streaming": "true"}
    assert registry.get_sample_value(name, labels) == expected


def test_a_metric_that_fails_does_not_end_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    emit_constants(None, SimpleNamespace(), max_total_num_tokens=5)  # no labels: an attribute error inside
    assert "a metric of kimi-w4a8-eagle3 failed" in caplog.text

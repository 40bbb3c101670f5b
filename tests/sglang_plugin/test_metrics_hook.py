"""Our metrics inside SGLang's process: the hooks apply on both releases, and the counter counts correctly.

What a real engine then shows is checked in tests/e2e/test_ops.py.
"""

from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram
from support.sglang_program import BOTH, VERSIONS, found

from kimi_w4a8_eagle3.sglang_plugin.metrics_hook import (
    SpecSteps,
    count_spec_steps,
    emit_constants,
    observe_tpot,
)

HOOKED = """
import json, pkgutil, sys
early = "prometheus_client" in sys.modules  # it must not be imported before the engine has named the shared folder
import sglang
from kimi_w4a8_eagle3.sglang_plugin.metrics_hook import ENGINE, REQUESTS
hooked = [hasattr(pkgutil.resolve_name(target), "__wrapped__") for target in (*ENGINE.names, *REQUESTS.names)]
print(json.dumps({"version": sglang.__version__, "hooked": hooked, "early": early}))
"""


@BOTH
def test_both_releases_are_hooked_before_prometheus_client_is_imported(newest: bool) -> None:
    facts = found(HOOKED, newest)
    assert facts["version"] == VERSIONS[newest]
    assert facts["hooked"] == [True, True, True] and not facts["early"]


@pytest.fixture
def steps() -> tuple[SpecSteps, CollectorRegistry]:
    registry = CollectorRegistry()
    counter = Counter("kimi_spec_steps", "Steps.", ["model_name", "accepted"], registry=registry)
    return SpecSteps(counter, {"model_name": "m"}, 4), registry


def counted(registry: CollectorRegistry) -> list[float | None]:
    return [
        registry.get_sample_value("kimi_spec_steps_total", {"model_name": "m", "accepted": str(k)}) for k in range(6)
    ]


def test_series_begin_at_zero_and_grow_with_the_histogram(steps: tuple[SpecSteps, CollectorRegistry]) -> None:
    counter, registry = steps
    assert counted(registry) == [0, 0, 0, 0, None, None]
    counter.add([1, 0, 2])
    counter.add([0, 0, 0, 0, 5])
    assert counted(registry) == [1, 0, 2, 0, 5, None]


@pytest.mark.parametrize(
    ("finished", "histograms", "expected"),
    [
        (True, [[9], [1, 2]], [1, 2, 0, 0, None, None]),
        (False, [[9], [1, 2]], [0, 0, 0, 0, None, None]),
        (True, [[9]], [0, 0, 0, 0, None, None]),
        (True, [[9], []], [0, 0, 0, 0, None, None]),
        (True, None, [0, 0, 0, 0, None, None]),
    ],
    ids=["finished", "running", "short-list", "no-steps", "no-speculation"],
)
def test_only_a_finished_requests_own_histogram_is_counted(
    steps: tuple[SpecSteps, CollectorRegistry], finished: bool, histograms: list | None, expected: list
) -> None:
    counter, registry = steps
    manager = SimpleNamespace(metrics_collector=SimpleNamespace(kimi_spec_steps=counter))
    output = SimpleNamespace(spec_correct_drafts_histogram=histograms)
    count_spec_steps(None, manager, SimpleNamespace(finished=finished), output, 1)
    assert counted(registry) == expected


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
    finished: bool, tokens: int, reason: dict | None, expected: float | None
) -> None:
    registry = CollectorRegistry()
    collector = SimpleNamespace(labels={"model_name": "m"})
    collector.kimi_tpot = Histogram("tpot", "Seconds.", ["model_name", "is_streaming"], registry=registry)
    state = SimpleNamespace(finished=finished, obj=SimpleNamespace(stream=True))
    state.time_stats = SimpleNamespace(get_decode_latency=lambda: 2.0)
    output = SimpleNamespace(completion_tokens=[9, tokens], finished_reasons=[None, reason])
    observe_tpot(None, SimpleNamespace(metrics_collector=collector), state, output, 1)
    assert registry.get_sample_value("tpot_sum", {"model_name": "m", "is_streaming": "true"}) == expected


def test_a_metric_that_fails_does_not_end_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    emit_constants(None, SimpleNamespace(), max_total_num_tokens=5)  # no labels: an attribute error inside
    assert "a metric of kimi-w4a8-eagle3 failed" in caplog.text

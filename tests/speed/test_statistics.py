"""Statistics of one server or of two in a report: values of requests, metrics, bootstrap intervals."""

from __future__ import annotations

import numpy as np
import pytest
from support.repetitions import repetition

from kimi_w4a8_lab.speed import statistics
from kimi_w4a8_lab.speed.statistics import METRICS, Interval, Repetition, estimate, ratio, request_values


def test_tpot_of_a_request_is_the_time_after_its_first_token() -> None:
    details = repetition([4.0, 6.0]).details
    assert details is not None
    assert request_values(details, "tpot") == pytest.approx([4.0, 6.0])
    assert request_values(details, "ttft") == pytest.approx([100.0, 100.0])  # 0.1 s
    short = details.model_copy(update={"output_lens": [1, 2], "itls": [[], [0.003]]})
    assert request_values(short, "tpot") == pytest.approx([3.0])  # one token has no time after the first
    with pytest.raises(ValueError, match="zip"):
        request_values(short.model_copy(update={"itls": [[], [0.003], []]}), "tpot")


def test_metrics_of_known_values() -> None:
    squares = np.arange(101.0) ** 2
    found = {
        name: float(statistics._statistic(squares, METRICS[f"tpot_{name}_ms"])) for name in ("median", "mean", "p99")
    }
    assert found == {"median": 2500.0, "mean": 3350.0, "p99": 9801.0}
    assert [key for key, metric in METRICS.items() if metric.higher_is_better] == ["output_throughput_tok_s"]


def test_an_interval_leaves_out_two_and_a_half_percent_on_each_side() -> None:
    assert statistics._interval(50.0, np.linspace(0, 100, 1001)) == Interval(50.0, 2.5, 97.5)


@pytest.mark.parametrize(("kind", "means"), [("itl", {1.0, 2.6, 9.0}), ("tpot", {1.0, 5.0, 9.0}), ("ttft", {100.0})])
def test_the_bootstrap_draws_requests_with_all_their_gaps(kind: str, means: set[float]) -> None:
    """Two requests: four gaps of 1 ms, one of 9 ms. The first, the second or both are drawn."""
    details = repetition([1.0, 1.0]).details
    assert details is not None
    details = details.model_copy(update={"output_lens": [5, 2], "itls": [[0.001] * 4, [0.009]]})
    drawn = statistics._draws_inside(details, METRICS[f"{kind}_mean_ms"], np.random.default_rng(0))
    assert len(drawn) == statistics.DRAWS and set(drawn.round(9)) == means


def test_gaps_between_pieces_give_a_figure_between_tokens_no_interval() -> None:
    """SGLang's generator divides a chat's gaps by the tokens of their pieces, and keeps them as they were."""
    found = repetition([4.0, 4.0])
    for figure, has_interval in ((4.0, True), (1.4, False)):
        load = found.load.model_copy(update={"median_itl_ms": figure})
        interval = estimate([Repetition(load, found.details)] * 2, METRICS["itl_median_ms"])
        assert interval.value == figure and (interval.low is not None) is has_interval


def test_the_ratio_interval_holds_the_truth_and_excludes_one() -> None:
    rng = np.random.default_rng(1)
    slow = [repetition(list(rng.normal(20, 1, 40))) for _ in range(3)]
    fast = [repetition(list(rng.normal(10, 1, 40))) for _ in range(3)]
    found = ratio(slow, fast, METRICS["tpot_median_ms"])
    assert found.covers(0.5) and not found.covers(1.0)
    assert found.value == pytest.approx(0.5, abs=0.03)


def test_throughput_has_no_interval_below_three_repetitions() -> None:
    made = repetition([1.0])
    three = [Repetition(made.load.model_copy(update={"output_throughput": speed}), None) for speed in (1.0, 2.0, 3.0)]
    assert estimate(three[:2], METRICS["output_throughput_tok_s"]) == Interval(1.5, None, None)
    assert estimate(three, METRICS["output_throughput_tok_s"]) == Interval(2.0, 1.0, 3.0)

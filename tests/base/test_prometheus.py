"""Rates and quantiles from counters and buckets."""

import math
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_w4a8_eagle3.base.prometheus import Reading, bucket_increase, increase, quantile

INF = math.inf


@pytest.mark.parametrize(
    ("share", "buckets", "expected"),
    [
        (0.5, {0.1: 10, 0.2: 20, INF: 20}, 0.1),
        (0.75, {0.1: 10, 0.2: 20, INF: 20}, 0.15),
        (0.25, {0.1: 10, 0.2: 20, INF: 20}, 0.05),
        (0.99, {0.1: 10, 0.2: 20, INF: 25}, 0.2),
        (0.5, {0.1: 0, 0.2: 0, 0.4: 8, INF: 8}, 0.3),
        (0.5, {0.1: 0, INF: 0}, None),
        (0.5, {}, None),
    ],
    ids=["edge", "inside", "first", "beyond", "empty-below", "nothing", "no-buckets"],
)
def test_a_quantile_is_linear_inside_its_bucket(share: float, buckets: dict, expected: float | None) -> None:
    assert quantile(share, buckets) == (None if expected is None else pytest.approx(expected))


@given(st.lists(st.floats(0, 5), min_size=1, max_size=60), st.floats(0.01, 0.99))
def test_a_quantile_lies_in_the_bucket_of_the_observation_with_its_rank(values: list[float], share: float) -> None:
    bounds = [0.5, 1.0, 2.0, 4.0]
    buckets = {bound: float(sum(v <= bound for v in values)) for bound in [*bounds, INF]}
    observation = sorted(values)[math.ceil(share * len(values)) - 1]
    upper = next((bound for bound in bounds if observation <= bound), bounds[-1])
    lower = max((bound for bound in bounds if bound < observation), default=0.0)
    assert lower - 1e-9 <= quantile(share, buckets) <= upper + 1e-9


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian package `prometheus`)")
def test_a_quantile_is_what_prometheus_computes(tmp_path) -> None:
    buckets = {0.125: 4, 0.25: 4, 0.5: 20, 1.0: 36, INF: 40}  # halves and quarters: equal to the last bit
    shares = [0.0625, 0.5, 0.75, 0.96875]
    series = "\n".join(
        f"      - {{series: 'h_bucket{{le=\"{'+Inf' if math.isinf(b) else b}\"}}', values: '{n}'}}"
        for b, n in buckets.items()
    )
    tests = "\n".join(
        f"      - {{expr: 'histogram_quantile({q}, h_bucket)', eval_time: 0s, "
        f"exp_samples: [{{labels: '{{}}', value: {quantile(q, buckets)!r}}}]}}"
        for q in shares
    )
    file = tmp_path / "quantiles.yml"
    file.write_text(
        "tests:\n  - interval: 1m\n    input_series:\n" + series + "\n    promql_expr_test:\n" + tests + "\n"
    )
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_growth_survives_a_restart() -> None:
    assert increase(None, 5) == 5 and increase(5, None) == 0 and increase(3, 5) == 2
    assert increase(100, 7) == 7
    assert bucket_increase({1.0: 4, INF: 9}, {1.0: 5, INF: 10}) == {1.0: 1, INF: 1}
    assert bucket_increase({1.0: 4, INF: 9}, {1.0: 4, INF: 5}) == {1.0: 4, INF: 5}


def test_a_reading_sums_and_picks_by_labels() -> None:
    text = 'a{rank="0",replica="x"} 1\na{rank="1",replica="x"} 2\na{rank="0",replica="y"} 8\n'
    reading = Reading.parse(text, at=0)
    assert reading.total("a") == 11 and reading.total("a", replica="x") == 3 and reading.total("b") is None
    assert reading.only(replica="x").largest("a") == 2 and reading.least("a") == 1
    assert reading.labels("a", "replica") == ("x", "y")
    assert reading.labels("a", "replica", 8.0) == ("y",)

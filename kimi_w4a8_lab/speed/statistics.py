"""Statistics of measurements: per-request values, medians over repetitions, bootstrap confidence intervals.

A repetition is one run of the load generator. Intervals come from a two-level bootstrap: repetitions are drawn with
replacement, and then the requests inside each. Inter-token gaps stay with their request, because they are not
independent. Throughput has one value per repetition, so only repetitions are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .generator import LoadDetails, LoadResult

ValueArray = NDArray[np.float64]
MetricKind = Literal["tpot", "itl", "ttft", "throughput"]
DRAWS = 1000
_ITL_DRAWS = 200
_LEVEL = 95.0


@dataclass(frozen=True)
class Metric:
    """One figure of the report. `field` is its name in `LoadResult`; quantile is None for a mean."""

    key: str
    title: str
    field: str
    unit: str
    kind: MetricKind
    quantile: float | None
    higher_is_better: bool = False


def _latency(kind: MetricKind) -> list[Metric]:
    name = kind.upper()
    return [
        Metric(f"{kind}_median_ms", f"{name} median", f"median_{kind}_ms", "ms", kind, 50),
        Metric(f"{kind}_mean_ms", f"{name} mean", f"mean_{kind}_ms", "ms", kind, None),
        Metric(f"{kind}_p99_ms", f"{name} P99", f"p99_{kind}_ms", "ms", kind, 99),
    ]


METRICS: dict[str, Metric] = {
    metric.key: metric
    for metric in (
        *_latency("tpot"),
        *_latency("itl"),
        *_latency("ttft"),
        Metric("output_throughput_tok_s", "output throughput", "output_throughput", "tok/s", "throughput", None, True),
    )
}


@dataclass(frozen=True)
class Repetition:
    """Result of one measurement with its per-request details (None if not kept)."""

    load: LoadResult
    details: LoadDetails | None


@dataclass(frozen=True)
class Interval:
    """Estimate with its 95% bootstrap interval; low and high are None if there are too few values to draw from."""

    value: float
    low: float | None
    high: float | None

    def covers(self, value: float) -> bool:
        return self.low is not None and self.high is not None and self.low <= value <= self.high


def estimate(repetitions: Sequence[Repetition], metric: Metric) -> Interval:
    """Return the median over repetitions of the generator's figure, with its interval."""
    return _interval(_median(repetitions, metric), _draws(repetitions, metric, np.random.default_rng(0)))


def ratio(base: Sequence[Repetition], other: Sequence[Repetition], metric: Metric) -> Interval:
    """Return other / base with its interval; the two sides are drawn independently."""
    rng = np.random.default_rng(0)
    value = _median(other, metric) / _median(base, metric)
    below, above = _draws(base, metric, rng), _draws(other, metric, rng)
    return _interval(value, None if below is None or above is None else above / below)


def request_values(details: LoadDetails, kind: MetricKind) -> ValueArray:
    """Return TPOT or TTFT of each request in ms. TPOT divides the time after the first token by the tokens after it."""
    if kind == "ttft":
        answered = [ttft for ttft, error in zip(details.ttfts, details.errors, strict=True) if not error]
        return np.asarray(answered, dtype=np.float64) * 1000
    pairs = zip(details.itls, details.output_lens, strict=True)
    return np.asarray([sum(gaps) / (count - 1) * 1000 for gaps, count in pairs if count > 1], dtype=np.float64)


def _median(repetitions: Sequence[Repetition], metric: Metric) -> float:
    return float(np.median([getattr(repetition.load, metric.field) for repetition in repetitions]))


def _interval(value: float, draws: ValueArray | None) -> Interval:
    if draws is None:
        return Interval(value, None, None)
    low, high = np.percentile(draws, [50 - _LEVEL / 2, 50 + _LEVEL / 2])
    return Interval(value, float(low), float(high))


def _draws(repetitions: Sequence[Repetition], metric: Metric, rng: np.random.Generator) -> ValueArray | None:
    """Return bootstrap draws of the median over repetitions; None if nothing can be drawn."""
    if metric.kind == "throughput":
        if len(repetitions) < 3:
            return None
        values = np.asarray([repetition.load.output_throughput for repetition in repetitions], dtype=np.float64)
        drawn: ValueArray = np.median(values[rng.integers(0, len(values), (DRAWS, len(values)))], axis=1)
        return drawn
    details = [repetition.details for repetition in repetitions if repetition.details is not None]
    if len(details) < len(repetitions) or not details:
        return None
    if metric.kind == "itl" and not all(map(_between_tokens, repetitions)):
        return None
    inside = np.stack([_draws_inside(detail, metric, rng) for detail in details])
    count, draws = inside.shape
    chosen = rng.integers(0, count, (draws, count))
    over_repetitions: ValueArray = np.median(inside[chosen, np.arange(draws)[:, None]], axis=1)
    return over_repetitions


def _between_tokens(repetition: Repetition) -> bool:
    """True if the recorded gaps are those behind the generator's figure.

    In a chat with drafts the gaps lie between pieces of several tokens, and the figure does not.
    """
    assert repetition.details is not None
    gaps = [gap * 1000 for gaps in repetition.details.itls for gap in gaps]
    return bool(gaps) and bool(np.isclose(np.median(gaps), repetition.load.median_itl_ms, rtol=0.01))


def _draws_inside(details: LoadDetails, metric: Metric, rng: np.random.Generator) -> ValueArray:
    """Return `DRAWS` values of the metric over requests drawn with replacement from one repetition."""
    if metric.kind == "itl":
        gaps = [np.asarray(itls, dtype=np.float64) * 1000 for itls in details.itls if itls]
        picks = rng.integers(0, len(gaps), (_ITL_DRAWS, len(gaps)))
        few = np.asarray([_statistic(np.concatenate([gaps[i] for i in pick]), metric) for pick in picks])
        return np.resize(few, DRAWS)
    values = request_values(details, metric.kind)
    drawn = values[rng.integers(0, len(values), (DRAWS, len(values)))]
    return _statistic(drawn, metric)


def _statistic(values: ValueArray, metric: Metric) -> ValueArray:
    if metric.quantile is None:
        return np.asarray(np.mean(values, axis=-1))
    return np.asarray(np.percentile(values, metric.quantile, axis=-1))

"""`bench predict`: TPOT, TTFT and throughput from the machine model, its error on published points, and advice.

The published workload is a closed loop of equal requests that start together. All prefill first, then decode together,
and so on in waves. A request therefore waits for half of the others' prefills before its first token and for the other
half after it. A wave of `C` requests takes `C` prefills plus the decode steps of one request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from kimi_w4a8_eagle3.base.errors import KimiError, UsageError
from kimi_w4a8_eagle3.recipe.launch import load_recipe, resolve

from ..speed import published
from ..speed.workloads import Workload
from .machine_model import PRECISIONS, Cluster, Terms, prefill, speculative_step

# The three figures that fix the three unknowns: latency of a small batch, of a large one, and prefill.
CALIBRATION = (
    ("con2", "w4a8", "tpot_median_ms"),
    ("con40", "w4a8", "itl_median_ms"),
    ("con40", "w4a8", "output_throughput_tok_s"),
)
_CALIBRATION_SOURCE = "2026-06"
SPECULATIVE_STEPS = 3
_CONCURRENCY = {"con2": 2, "con40": 40}
MAX_STEPS = 3  # AITER verifies at most four tokens at once on gfx942 (aiter#5679)
_KNOWN = ("tpot_median_ms", "itl_median_ms", "ttft_median_ms", "output_throughput_tok_s")


@dataclass(frozen=True)
class Load:
    """Closed loop of equal requests. steps: draft steps, 0 without speculation; accept_length: tokens per verify."""

    concurrency: int
    input_len: int = 10240
    output_len: int = 512
    precision: str = "w4a8"
    steps: int = 0
    accept_length: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.accept_length <= self.steps + 1:
            raise UsageError(
                f"accept length {self.accept_length} with {self.steps} draft steps",
                where="--accept-length",
                expected=f"1 to {self.steps + 1}",
            )
        if min(self.concurrency, self.input_len) < 1 or self.output_len < 2:
            raise UsageError(
                "the load is empty",
                where="--concurrency, --input-len, --output-len",
                expected="concurrency and input of at least 1, output of at least 2 tokens",
            )


@dataclass(frozen=True)
class Fit:
    """Fitted unknowns: seconds per layer, and the shares of the peaks that decode and prefill reach."""

    layer_s: float
    decode_efficiency: float
    prefill_efficiency: float

    @property
    def vector(self) -> NDArray[np.float64]:
        return np.array([self.layer_s, 1 / self.decode_efficiency, 1 / self.prefill_efficiency])


@dataclass(frozen=True)
class PublishedPoint:
    """A published figure, in ms or tok/s. point: load. side: recipe or precision."""

    source: str
    point: str
    side: str
    key: str
    published: float


@dataclass(frozen=True)
class PredictedPoint(PublishedPoint):
    predicted: float
    calibrated: bool

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def step_terms(load: Load, cluster: Cluster) -> Terms:
    """Return the cost of one step of `load`: a verify step with its draft steps, or a plain step."""
    context = load.input_len + load.output_len / 2
    return speculative_step(load.concurrency, load.steps, context, PRECISIONS[load.precision], cluster)


def median_chunk(accept_length: float, steps: int) -> int:
    """Return the tokens of the chunk in which the median token arrives; a step sends 1 to steps + 1 tokens.

    SGLang's generator divides the time between two chunks by the tokens of the second, and counts the quotient once for
    each of them. The median ITL is therefore a step's time divided by this size, not by the accept length.
    """
    alpha, tokens = acceptance_probability(accept_length, steps), 0.0
    for size in range(steps + 1, 1, -1):
        tokens += size * alpha ** (size - 1) * (1.0 if size > steps else 1.0 - alpha)
        if tokens >= accept_length / 2:
            return size
    return 1


def terms(load: Load, key: str, cluster: Cluster) -> Terms:
    """Return figure `key` of `load` as a linear function of the unknowns, in seconds or seconds per token."""
    step = step_terms(load, cluster)
    a_token = step / load.accept_length
    prompt = prefill(load.input_len, PRECISIONS[load.precision], cluster, load.concurrency)
    waits = prompt * (load.concurrency - 1) / 2
    later = load.output_len - 1
    found: dict[str, Terms] = {
        "itl_median_ms": step / median_chunk(load.accept_length, load.steps),
        "tpot_median_ms": a_token + waits / later,
        "ttft_median_ms": prompt + waits,
        "output_throughput_tok_s": (prompt * load.concurrency + a_token * later) / (load.concurrency * load.output_len),
    }
    return found[key]


def predict(load: Load, key: str, fit: Fit, cluster: Cluster) -> float:
    """Return figure `key` in ms or tok/s."""
    seconds = float(terms(load, key, cluster) @ fit.vector)
    return 1 / seconds if key == "output_throughput_tok_s" else seconds * 1000


def of_workload(
    side: str, workload: Workload, concurrency: int, length: float | None, key: str, settings: Sequence[str] = ()
) -> float | None:
    """Return figure `key` of a recipe with TP 8 on MI325X at the measured accept length; None if the model has none.

    settings: changes to the recipe, as for `--set`.
    """
    if workload.input_len is None or key not in _KNOWN:
        return None
    try:
        recipe = resolve(load_recipe(side), settings).recipe
        steps = int(str(recipe.args.get("speculative-num-steps", 0))) if length else 0
        load = Load(concurrency, workload.input_len, workload.output_len, _precision(side), steps, length or 1.0)
    except KimiError:  # not a recipe of this machine, or the server ran with other draft steps
        return None
    args, cluster = recipe.args | recipe.improved_args, Cluster()
    known = recipe.hardware.reference == "mi325x" and (args.get("tp-size"), args.get("dp-size", 1)) == (cluster.tp, 1)
    return predict(load, key, calibrate(cluster), cluster) if known else None


def _precision(side: str) -> str:
    return side if side in PRECISIONS else "w4a8"


def largest_error(side: str, key: str) -> float:
    """Return how far a published figure of the recipe's precision is from the model at most, in whole percent of it."""
    points = [one for one in check(calibrate(Cluster()), Cluster()) if one.key == key and not one.calibrated]
    same = [one for one in points if _precision(one.side) == _precision(side)]
    return math.ceil(max(100 * abs(one.published / one.predicted - 1) for one in same)) / 100


def calibrate(cluster: Cluster) -> Fit:
    """Fit the three unknowns to `CALIBRATION`."""
    return fit_points([point for point in published_points() if _calibrates(point)], cluster)


def fit_points(points: Sequence[PublishedPoint], cluster: Cluster) -> Fit:
    """Fit the three unknowns to published figures, with equal weight for equal relative errors.

    Neither pass reaches more than the peak of the machine: a share that would be larger is fixed at 1.
    """
    rows = []
    for one in points:
        seconds = 1 / one.published if one.key == "output_throughput_tok_s" else one.published / 1000
        rows.append(terms(_load(one.point, one.side), one.key, cluster) / seconds)
    table, costs, free = np.array(rows), np.ones(3), np.ones(3, dtype=bool)
    while True:
        costs[free] = np.linalg.lstsq(table[:, free], 1 - table[:, ~free].sum(axis=1), rcond=None)[0]
        beyond = free & (costs < 1) & np.array([False, True, True])
        if not beyond.any():
            return Fit(float(costs[0]), float(1 / costs[1]), float(1 / costs[2]))
        free, costs[beyond] = free & ~beyond, 1.0


def check(fit: Fit, cluster: Cluster) -> list[PredictedPoint]:
    """Return every published MI325X figure that the model covers, with the model's value."""
    return [
        PredictedPoint(
            **asdict(one),
            predicted=predict(_load(one.point, one.side), one.key, fit, cluster),
            calibrated=_calibrates(one),
        )
        for one in published_points()
    ]


def _calibrates(one: PublishedPoint) -> bool:
    return one.source == _CALIBRATION_SOURCE and (one.point, one.side, one.key) in CALIBRATION


@dataclass(frozen=True)
class Choice:
    """Number of draft steps (topk 1, so steps + 1 draft tokens) with the model's figures."""

    steps: int
    accept_length: float
    tpot_ms: float
    throughput_tok_s: float


def choices(load: Load, fit: Fit, cluster: Cluster) -> list[Choice]:
    """Return the figures for all numbers of draft steps from 0, on text with the accept length of `load`."""
    alpha = acceptance_probability(load.accept_length, load.steps)
    found = []
    for steps in range(MAX_STEPS + 1):
        length = sum(alpha**i for i in range(steps + 1))
        changed = Load(load.concurrency, load.input_len, load.output_len, load.precision, steps, length)
        tpot, rate = (predict(changed, key, fit, cluster) for key in ("tpot_median_ms", "output_throughput_tok_s"))
        found.append(Choice(steps, length, tpot, rate))
    return found


def acceptance_probability(accept_length: float, steps: int) -> float:
    """Return the probability that a draft token is accepted after an accepted one, if equal at every position."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**i for i in range(steps + 1)) < accept_length:
            low = middle
        else:
            high = middle
    return high


def _load(point: str, side: str) -> Load:
    """Return a published load; a speculating side without its own accept length takes that of its point."""
    if side in PRECISIONS:
        return Load(_CONCURRENCY[point], precision=side)
    sides = published.points()[point]
    length = next(values["accept_length"] for values in sides.values() if "accept_length" in values)
    return Load(_CONCURRENCY[point], steps=SPECULATIVE_STEPS, accept_length=length)


def published_accept_length(concurrency: int) -> float:
    """Return the accept length of the published point at that concurrency, or of con40."""
    point = next((name for name, requests in _CONCURRENCY.items() if requests == concurrency), "con40")
    return _load(point, "eagle3-opt").accept_length


def published_points() -> list[PublishedPoint]:
    """Return all published MI325X figures that the model covers."""
    sources = ("mi325x-eagle3", "2026-06"), ("mi325x-w4a16-w4a8-w8a8", "2026-05")
    return [
        PublishedPoint(title, point, side, key, values[key])
        for name, title in sources
        for point, sides in published.load(name)["points"].items()
        for side, values in sides.items()
        for key in _KNOWN
        if key in values
    ]


def mean_error(points: Sequence[PredictedPoint]) -> float:
    """Return the mean absolute relative error of the points not used to calibrate."""
    return float(np.mean([abs(point.error) for point in points if not point.calibrated]))

"""Verdict on measured speed, beside the model's interval and the published figure of eight MI325X."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.machine.hardware import Machine

from ..base.verdict import Verdict
from ..predict.predict import largest_error, of_workload, published_accept_length
from ..speed import published
from ..speed.runs import Cell
from ..speed.statistics import METRICS, Metric
from .journal import Figure

_TPOT, _TTFT, _RATE = (METRICS[key] for key in ("tpot_median_ms", "ttft_median_ms", "output_throughput_tok_s"))
_LENGTH = Metric("", "accept length", "", "tokens", "throughput", None, higher_is_better=True)
_LENGTH_SPREAD = 0.1  # each text has one published length only
_LOOK_FIRST = {  # the first row whose figures are all slow
    (_LENGTH,): "the draft's checkpoint, because the accept length is below that of this text",
    (_TPOT, _TTFT): "clocks and power cap (`amd-smi metric`), because prefill and decode are both slow",
    (_TTFT,): "the kernels' backend and gates in the engine's log, because prefill is slow",
    (_TPOT,): "the all-reduce (`disable-custom-all-reduce`), because decode alone is slow",
    (): "requests that waited or were retracted, because each one was as fast as expected",
}


def why_not_judged(machine: Machine, prompts: int | None) -> str:
    """Return the reason why speed cannot be judged on this machine or with so few prompts, "" if it can."""
    count, gpu = len(machine.devices), machine.gpu.name.upper() if machine.gpu else "unknown"
    if count < 8 or gpu != "MI325X":
        here = f"{count} x {gpu}" if count else "no GPU"
        return f"this machine has {here}; the model and the published figures are of 8 x MI325X"
    return "" if prompts is None else f"a quick run sends only {prompts} prompts"


def speed_figures(cell: Cell, judged: bool) -> list[Figure]:
    """Return TPOT, TTFT, throughput and accept length, with their limits if they are judged."""
    point, length, side = cell.workload.reference if judged else None, cell.accept_length, cell.side
    reported, spread = published.reported(side, point or "")[0], published.day_to_day(point or "", "largest") or 0.0
    figures = []
    for metric in (_TPOT, _TTFT, _RATE):
        value = of_workload(side, cell.workload, cell.concurrency, length, metric.key) if judged else None
        model, article = (value, largest_error(side, metric.key)), (reported.get(metric.key), spread)
        figures.append(_limited(metric, cell.figures[metric.key].value, model, article))
    if length is not None:  # a property of the text, whatever the recipe
        wanted = published_accept_length(cell.concurrency) if point else None
        figures.append(_limited(_LENGTH, length, (None, 0.0), (wanted, _LENGTH_SPREAD)))
    return figures


def _limited(metric: Metric, value: float, *expected: tuple[float | None, float]) -> Figure:
    """Return the figure with the stricter limit of what is expected: values with the accepted difference, a share."""
    if not (math.isfinite(value) and value > 0):
        raise KimiError(f"{metric.title} is {value}: nothing was measured", remedy="read the engine's log")
    sign = -1 if metric.higher_is_better else 1
    limits = [sign * known * (1 + sign * spread) for known, spread in expected if known and math.isfinite(known)]
    limit = sign * min(limits) if limits else None
    slow = limit is not None and sign * value > sign * limit
    (predicted, _), (reported, _) = expected
    return Figure(metric.title, value, metric.unit, predicted, reported, limit, slow)


def judge(figures: Sequence[Figure], why_not: str) -> tuple[Verdict, str]:
    """Return PASS, SLOW with the first thing to look at, or MEASURED with the reason, for figures with limits."""
    if why_not or all(figure.limit is None for figure in figures if figure.name != _LENGTH.title):
        return Verdict.MEASURED, why_not or "there is no prediction and no published figure"
    slow = {figure.name: f"{figure}, limit {figure.limit:.4g}" for figure in figures if figure.slow}
    if not slow:
        return Verdict.PASS, "as fast as expected"
    look = next(look for row, look in _LOOK_FIRST.items() if all(metric.title in slow for metric in row))
    return Verdict.SLOW, f"{'; '.join(slow.values())}. Look first at {look}"

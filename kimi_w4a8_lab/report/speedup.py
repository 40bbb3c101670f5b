"""Speed-up by speculation on other text: the measured costs, with the accept length as the only unknown.

A request's time per output token is `stall + step / L`. A verify step with its drafts takes `step` and commits L tokens
on average. `stall` is the waiting time per token outside decoding, mostly other requests' prefill. `step` does not
depend on the text, so one run gives the speed-up at any accept length, and the break-even point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from ..predict.predict import SPECULATIVE_STEPS, median_chunk
from ..speed import published
from ..speed.runs import Cell, Groups
from ..speed.statistics import Repetition


@dataclass(frozen=True)
class Speedup:
    """TPOT speed-up of a speculating side over a plain one as a function of the accept length; times in ms."""

    title: str
    measured_here: bool
    base_tpot_ms: float
    tpot_ms: float
    accept_length: float
    step_ms: float
    stall_ms: float
    base_step_ms: float | None = None

    def at(self, accept_length: float) -> float:
        """Return the speed-up over the plain side at this accept length."""
        return self.base_tpot_ms / (self.stall_ms + self.step_ms / accept_length)

    @property
    def measured(self) -> float:
        return self.base_tpot_ms / self.tpot_ms

    @property
    def break_even(self) -> float:
        """Accept length below which speculation costs time; infinite if it always does."""
        spare = self.base_tpot_ms - self.stall_ms
        return self.step_ms / spare if spare > 0 else float("inf")


def measured(groups: Groups) -> dict[tuple[str, int, str], Speedup]:
    """Return the curves of speculating sides measured beside a plain one, by workload, concurrency and side."""
    found = {}
    for (workload, concurrency), sides in groups.items():
        plain = next((cell for cell in sides.values() if cell.accept_length is None), None)
        for side, cell in sides.items():
            if plain is not None and cell.accept_length is not None:
                title = f"{workload}, concurrency {concurrency}: {side} over {plain.side}"
                found[workload, concurrency, side] = _curve(title, plain, cell, cell.accept_length)
    return found


def _curve(title: str, base: Cell, fast: Cell, length: float) -> Speedup:
    """Return the curve of `fast`, which speculates with accept length `length`, over `base`."""
    tpot, base_tpot = (cell.figures["tpot_median_ms"].value for cell in (fast, base))
    step = _step_ms(fast.repetitions)
    if step is None or step / length > tpot:
        step = tpot * length
    return Speedup(title, True, base_tpot, tpot, length, step, tpot - step / length, _step_ms(base.repetitions))


def from_published() -> list[Speedup]:
    """Return the curves of the published figures; a step is the median ITL times the tokens of the median's chunk."""
    found = []
    for point, sides in published.points().items():
        base = sides[published.BASELINE]["tpot_median_ms"]
        spec = next(values for values in sides.values() if "accept_length" in values)
        tpot, length = spec["tpot_median_ms"], spec["accept_length"]
        itl = spec.get("itl_median_ms")
        step = tpot * length if itl is None else itl * median_chunk(length, SPECULATIVE_STEPS)
        found.append(Speedup(f"published {point}", False, base, tpot, length, step, max(0.0, tpot - step / length)))
    return found


def step_gaps_ms(repetition: Repetition) -> list[float]:
    """Return the times between chunks of the stream.

    The generator divides a gap by the number of tokens that came with it and repeats the quotient for each token, so a
    run of equal values is one chunk.
    """
    if repetition.details is None:
        return []
    return [value * 1000 * sum(1 for _ in same) for gaps in repetition.details.itls for value, same in groupby(gaps)]


def _step_ms(repetitions: Sequence[Repetition]) -> float | None:
    gaps = [gap for repetition in repetitions for gap in step_gaps_ms(repetition)]
    return float(np.median(gaps)) if gaps else None

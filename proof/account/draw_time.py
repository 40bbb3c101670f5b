"""Model of the time that sampling adds to a verify step on an MI325X; none of it was measured.

A greedy step adds nothing. A sampled step divides the logits by the temperature and takes their softmax, which moves
the rows four times through HBM, and then draws (`sampling/triton_draw.py`). Each program of the draw has one row and
one compute unit. It passes over the row once for the largest probability, nine times for a filter's threshold, and
once for the race. docs/perf/kernels.md names the source of the clocks.
"""

from __future__ import annotations

from .moe_time import CACHE_TB_S, SMALL_TB_S, SMALL_US

CLOCK_GHZ = 2.1
PASS_CLOCKS, RACE_CLOCKS = 0.141, 1.9  # vector ALU clocks per element on one compute unit
HBM_PASSES, FILTER_PASSES, _KERNELS = 4, 9, 3


def draw_ms(rows: int, vocabulary: int, filtered: bool = True) -> float:
    """Return the milliseconds of `rows` draws from float32 rows of `vocabulary`; filtered: top-k, top-p or min-p."""
    megabytes = rows * vocabulary * 4 / 1e6
    cached_us = megabytes / CACHE_TB_S
    scan_us, race_us = (max(cached_us, vocabulary * clocks / CLOCK_GHZ / 1e3) for clocks in (PASS_CLOCKS, RACE_CLOCKS))
    scans = 1 + (FILTER_PASSES if filtered else 0)
    return (_KERNELS * SMALL_US + HBM_PASSES * megabytes / SMALL_TB_S + scans * scan_us + race_us) / 1e3

"""Fit of the kernel times to AITER's tuned timings on gfx942 GPUs with 304 compute units.

`aiter_gfx942.csv` holds microseconds from the tuning files under `aiter/configs` of ROCm/aiter at commit e4048607: both
stages of MoE layers with FP8 and BF16 weights, and INT8 and BF16 matrix products. The files do not say whether the GPU
was an MI300X or an MI325X. No bandwidth is fitted above the peak of an MI325X, and no rate above that of the matrix
units: some small products repeat in the last-level cache, and would be fitted with more. A kernel takes

    us + max(bytes / tb_s, operations / (share * peak)) + bytes added atomically / added_tb_s

with the rows of each expert padded to its block. INT8 and FP8 kernels share one `share` for dense products and stage 1.
Neighbouring rows are token counts of one shape, so every second row of a kernel fits the figures. Errors are of shapes
that were left out of the fit: `python -m proof.account.calibration`.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from scipy.optimize import least_squares

from kimi_w4a8_eagle3.base.console import table_console
from kimi_w4a8_eagle3.machine.hardware import GPUS
from kimi_w4a8_eagle3.moe.contract import MoeShape
from kimi_w4a8_lab.predict.machine_model import BF16_OPS, INT8_OPS

from .blocks import expected_blocks

TIMINGS = Path(__file__).with_name("aiter_gfx942.csv")
STAGE1, STAGE2, INT8, BF16 = "MoE stage 1", "MoE stage 2", "INT8 products", "BF16 products"
KERNELS = (STAGE1, STAGE2, INT8, BF16)
# Pairs of (8-bit, BF16) shares of the peak: stage 1 with dense INT8 products, stage 2, dense BF16 products.
_SHARES = {STAGE1: (8, 9), STAGE2: (10, 11), INT8: (8, 9), BF16: (8, 12)}
_ADDED = 13
_START = (13, 9, 10, 50, 4.2, 3.7, 1.3, 6, 0.48, 0.42, 0.33, 0.3, 0.39, 1.3)


@dataclass(frozen=True)
class Rates:
    """Fitted figures of one kernel.

    us: fixed time. tb_s: bandwidth of its reading. share: of the INT8 or BF16 peak. added_tb_s: bandwidth of atomic
    additions, by stage 2 alone.
    """

    us: float
    tb_s: float
    share: float
    added_tb_s: float


@dataclass(frozen=True)
class HeldOut:
    """Errors of one kind of timing, each by a fit that saw no timing of the same shape."""

    kernel: str
    bf16: bool
    shapes: int
    errors: tuple[float, ...]


@dataclass(frozen=True)
class _Timings:
    kernel: NDArray[np.int64]  # index into KERNELS
    bf16: NDArray[np.bool_]
    read: NDArray[np.float64]  # bytes
    peaks: NDArray[np.float64]  # microseconds of the operations at the peak
    added: NDArray[np.float64]  # bytes
    us: NDArray[np.float64]
    shape: NDArray[np.int64]  # equal for equal sizes of weights


@cache
def rates() -> dict[str, Rates]:
    """Return the fitted figures by kernel."""
    timings = _load()
    every_second = np.concatenate([np.flatnonzero(timings.kernel == kind)[::2] for kind in range(len(KERNELS))])
    found = np.exp(_fit(timings, every_second))
    table = {}
    for number, name in enumerate(KERNELS):
        share = found[_SHARES[name][1 if name == BF16 else 0]]
        added = found[_ADDED] if name == STAGE2 else float("inf")
        table[name] = Rates(*map(float, (found[number], found[len(KERNELS) + number], share, added)))
    return table


def held_out() -> list[HeldOut]:
    """Return the errors by kind, every shape judged by a fit without it."""
    timings = _load()
    errors = np.zeros(len(timings.us))
    for shape in np.unique(timings.shape):
        judged = timings.shape == shape
        figures = _fit(timings, np.flatnonzero(~judged))
        errors[judged] = np.abs(np.exp(_error(figures, timings)[judged]) - 1)
    table = []
    for number, name in enumerate(KERNELS):
        for bf16 in (False, True):
            kind = (timings.kernel == number) & (timings.bf16 == bf16)
            if kind.any():
                table.append(HeldOut(name, bf16, len(np.unique(timings.shape[kind])), tuple(map(float, errors[kind]))))
    return table


def _fit(timings: _Timings, fitting: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the figures' logarithms; robust, because a few small products are twice as slow as their neighbours."""
    start, most = np.log(_START), np.full(len(_START), np.inf)
    most[len(KERNELS) : 2 * len(KERNELS)] = np.log(GPUS["mi325x"].hbm_tb_s)
    most[2 * len(KERNELS) : _ADDED] = 0.0
    return least_squares(
        lambda logs: _error(logs, timings)[fitting],
        np.minimum(start, most - 1e-3),
        bounds=(-np.inf, most),
        loss="soft_l1",
        f_scale=0.05,
    ).x


def _error(logs: NDArray[np.float64], timings: _Timings) -> NDArray[np.float64]:
    return np.asarray(np.log(_predict(np.exp(logs), timings) / timings.us))


def _predict(figures: NDArray[np.float64], timings: _Timings) -> NDArray[np.float64]:
    """Return the microseconds of every timing; figures: fixed times, bandwidths and shares in the order of `_START`."""
    pairs = np.array([_SHARES[name] for name in KERNELS])[timings.kernel]
    share = figures[np.where(timings.bf16, pairs[:, 1], pairs[:, 0])]
    reading = timings.read / figures[len(KERNELS) + timings.kernel] / 1e6
    work = np.maximum(reading, timings.peaks / share)
    return np.asarray(figures[timings.kernel] + work + timings.added / figures[_ADDED] / 1e6)


def _load() -> _Timings:
    rows: list[tuple[float, ...]] = []
    shapes: dict[tuple[int, ...], int] = {}
    with TIMINGS.open() as file:
        for row in csv.DictReader(file):
            size, tokens, k, n, experts, top_k, block = (int(value) for value in list(row.values())[1:8])
            shape = shapes.setdefault((size, k, n, experts), len(shapes))
            peak = (BF16_OPS if size == 2 else INT8_OPS) / 1e6
            if row["kernel"] == "dense":
                read = experts * (n * k * size + tokens * k * size + tokens * n * 2)
                kernel = KERNELS.index(BF16 if size == 2 else INT8)
                rows.append((kernel, size == 2, read, 2 * experts * tokens * k * n / peak, 0, float(row["us1"]), shape))
                continue
            touched, blocks = expected_blocks(MoeShape(experts, k, n, top_k), tokens, block)
            for number, (weights, added) in enumerate(((2 * k * n, 0), (k * n, tokens * top_k * k * 2))):
                work = 2 * blocks * block * weights / peak
                us = float(row[f"us{number + 1}"])
                rows.append((number, size == 2, touched * weights * size, work, added, us, shape))
    numbers, bf16, reads, peaks, adds, times, shape_numbers = (np.array(column) for column in zip(*rows, strict=True))
    return _Timings(numbers.astype(int), bf16.astype(bool), reads, peaks, adds, times, shape_numbers.astype(int))


def main() -> None:
    """Print the fitted figures and their errors."""
    console = table_console()
    table = Table("kernel", "fixed, us", "TB/s", "share of the peak", "added, TB/s")
    for name, fit in rates().items():
        added = f"{fit.added_tb_s:.2f}" if np.isfinite(fit.added_tb_s) else ""
        table.add_row(name, f"{fit.us:.1f}", f"{fit.tb_s:.2f}", f"{fit.share:.0%}", added)
    console.print(table)
    table = Table("kind", "shapes", "timings", "median error", "mean", "worst", title="Errors of shapes left out")
    for kind in held_out():
        errors = f"{np.median(kind.errors):.0%}", f"{np.mean(kind.errors):.0%}", f"{max(kind.errors):.0%}"
        name = f"{kind.kernel}, {'BF16' if kind.bf16 else '8-bit'}"
        table.add_row(name, str(kind.shapes), str(len(kind.errors)), *errors)
    console.print(table)


if __name__ == "__main__":
    main()

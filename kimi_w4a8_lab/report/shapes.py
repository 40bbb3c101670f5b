"""Speed-up by shape: how much of it reaches a request, and why it shrinks when inputs grow.

A request of a closed loop takes `TTFT + (tokens - 1) x TPOT`. Its decoding takes `(tokens - 1) x step` of that, where
the step is the median gap between two chunks of a stream. The rest is prefill, its own and that of other requests.
Speculation changes only the decoding: L tokens for each verify step instead of one for each plain step. Two things
therefore make it smaller. Prefill takes a larger share, and a verify step costs more plain steps, because each of its
tokens attends to the whole context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from ..speed.runs import Cell
from ..speed.statistics import Interval
from .analysis import Analysis
from .page import Table, Words

_MEASURED = ("shape", "concurrency", "plain, tok/s", "with drafts, tok/s", "speed-up", "accept length")
_COLUMNS = (*_MEASURED, "verify step / plain step", "speed-up of decoding", "decoding's share", "computed speed-up")


@dataclass(frozen=True)
class Shape:
    """One speculating side beside a plain one at one shape and concurrency.

    speedup: of the output throughput. step_ratio: a verify step's time over a plain step's. decoding: share of a plain
    request's time.
    """

    workload: str
    lengths: str
    concurrency: int
    side: str
    plain_tok_s: float
    tok_s: float
    speedup: Interval
    accept_length: float
    step_ratio: float
    decoding: float

    @property
    def decode_speedup(self) -> float:
        return self.accept_length / self.step_ratio

    @property
    def together(self) -> float:
        """Speed-up that a request has when its prefill takes as long as without drafts."""
        return 1 / (1 - self.decoding + self.decoding / self.decode_speedup)


def shapes(analysis: Analysis) -> list[Shape]:
    """Return the shapes that were measured with and without drafts, in measuring order."""
    found = []
    rows = {(row.workload, row.concurrency, row.b): row for row in analysis.changes if row.metric.kind == "throughput"}
    for key, curve in analysis.measured_speedups.items():
        cell, row = analysis.cells[key], rows.get(key)
        if cell.workload.input_len is None or row is None or not curve.base_step_ms:
            continue
        plain = analysis.cells[key[0], key[1], row.a]
        found.append(
            Shape(
                workload=key[0],
                lengths=f"{cell.workload.input_len:,}/{cell.workload.output_len:,}",
                concurrency=key[1],
                side=key[2],
                plain_tok_s=row.value_a.value,
                tok_s=row.value_b.value,
                speedup=row.change,
                accept_length=curve.accept_length,
                step_ratio=curve.step_ms / curve.base_step_ms,
                decoding=min(1.0, curve.base_step_ms / _per_token_ms(plain)),
            )
        )
    return found


def _per_token_ms(cell: Cell) -> float:
    """Return the time of a mean request for each token after its first."""
    after = cell.workload.output_len - 1
    return cell.figures["ttft_mean_ms"].value / after + cell.figures["tpot_mean_ms"].value


def table(found: Sequence[Shape]) -> Table:
    rows = []
    for one in found:
        speeds = f"{one.plain_tok_s:,.1f}", f"{one.tok_s:,.1f}", f"{one.speedup.value:.2f}x", f"{one.accept_length:.2f}"
        causes = f"{one.step_ratio:.2f}", f"{one.decode_speedup:.2f}x", f"{one.decoding:.0%}", f"{one.together:.2f}x"
        rows.append([f"{one.lengths} ({one.side})", str(one.concurrency), *speeds, *causes])
    return Table(_COLUMNS, rows, "Speed-up by shape")


def sentences(found: Sequence[Shape]) -> list[Words]:
    """Return, for each side and concurrency with several shapes, how the gain differs between them and why."""
    said = []
    for (side, concurrency), same in groupby(sorted(found, key=_group), key=_group):
        many = sorted(same, key=lambda one: one.speedup.value)
        if len(many) > 1:
            worst, best = many[0], many[-1]
            said.append(
                f"{side} at concurrency {concurrency}: {best.speedup.value:.2f}x on {best.lengths} and "
                f"{worst.speedup.value:.2f}x on {worst.lengths}. Decoding is {best.decoding:.0%} and "
                f"{worst.decoding:.0%} of a plain request, and a verify step costs {best.step_ratio:.2f} and "
                f"{worst.step_ratio:.2f} plain steps."
            )
    return [Words(sentence) for sentence in said]


def _group(shape: Shape) -> tuple[str, int]:
    return shape.side, shape.concurrency

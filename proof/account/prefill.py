"""Largest parts of a prefill, each with what could shrink it: a setting with its price, or the reason for none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kimi_w4a8_lab.predict.layouts import layout
from kimi_w4a8_lab.predict.machine_model import BF16_OPS, INT8_OPS, Cluster

from . import calibration
from .levers import Lever
from .parts import Account, AccountRow, prefill_parts

CHUNKS = (16384, 8192, 4096, 2048)  # tokens of a prefill batch
_DENSE, _REDUCES = "dense matrix products", "all-reduces"


@dataclass(frozen=True)
class Shrinking:
    """One way to shorten a part of a prefill. saved_ms: negative if it takes longer."""

    part: str
    way: str
    saved_ms: float
    setting: str


def ways(account: Account, changes: Sequence[Lever], cluster: Cluster) -> list[Shrinking]:
    """Return the ways for the largest parts, by part; changes: those of `levers`."""
    rows = {row.name: row for row in account.prefill}
    kernels, shared, fused, quantized = (
        _lever(changes, name)
        for name in (
            "MoE kernels of this package",
            "attention input shared by ranks",
            "all-reduce, residual and norm in one kernel",
            "prefill all-reduces in INT8",
        )
    )
    int8_ms = rows[_DENSE].ms * _rate(calibration.BF16) / _rate(calibration.INT8)
    found = [
        Shrinking(_REDUCES, "all-reduces in INT8", *_priced(quantized)),
        Shrinking(
            _REDUCES,
            "two-batch overlap, at most",
            rows[_REDUCES].ms,
            "none: SGLang refuses `enable-two-batch-overlap` without expert parallelism or DP attention",
        ),
        Shrinking(
            _DENSE,
            "FP8 weights and activations, at most",
            rows[_DENSE].ms - int8_ms,
            "env.KIMI_DENSE_FP8=prefill",
        ),
        Shrinking(f"{_DENSE}, {_REDUCES}, norms", "attention input shared by ranks", *_priced(shared)),
        Shrinking("MoE: stage1, stage2", "MoE kernels of this package", *_priced(kernels)),
        Shrinking("attention", "none known", 0.0, "none: the rate of AITER's kernel is assumed, not measured"),
        Shrinking("other kernels", "all-reduce, residual and norm in one kernel", *_priced(fused)),
    ]
    base = chunked_ms(account, cluster, layout("agent").chunk)
    for size in CHUNKS:
        name = f"chunks of {size:,} tokens"
        found.append(Shrinking("all", name, base - chunked_ms(account, cluster, size), f"chunked-prefill-size={size}"))
    return found


def chunked_ms(account: Account, cluster: Cluster, size: int) -> float:
    """Return the counted milliseconds of one of the load's prefills, which wait together, in batches of `size` tokens.

    SGLang's PrefillAdder fills the batch that ends a prompt with the next one. Attention is over all tokens once.
    """

    def others(tokens: int) -> float:
        parts: list[AccountRow] = prefill_parts(replace(account.load, input_len=tokens), cluster, cluster.shapes)
        return sum(row.ms for row in parts if row.name != "attention")

    full, rest = divmod(account.load.concurrency * account.load.input_len, size)
    return (full * others(size) + (others(rest) if rest else 0.0)) / account.load.concurrency


def _rate(kernel: str) -> float:
    share = calibration.rates()[kernel].share
    return share * (BF16_OPS if kernel == calibration.BF16 else INT8_OPS)


def _lever(changes: Sequence[Lever], name: str) -> Lever:
    return next(lever for lever in changes if lever.change.name == name)


def _priced(lever: Lever) -> tuple[float, str]:
    faults = f" (known faults: {', '.join(lever.faults)})" if lever.faults else ""
    return lever.change.prefill_ms, ", ".join(lever.change.settings) + faults


def cells(way: Shrinking) -> tuple[str, str, str, str]:
    """Return the row of a table."""
    return way.part, way.way, f"{-way.saved_ms:+.1f}" if way.saved_ms else "", way.setting

"""Count logits that are NaN while they are made finite: a broken tensor or kernel otherwise looks like an answer.

`failing_requests` sets SGLANG_SANITIZE_NAN_LOGITS. With it, a model that computes NaN answers "" with status 200.
SGLang reads all logits twice and writes them once for it; `sampling/finite.py` reads them once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch
from sglang.srt.environ import envs

from ...sampling.finite import FiniteLogits
from ..hooks import Feature, counter

if TYPE_CHECKING:
    from prometheus_client import Counter

FEATURE = Feature("the count of NaN logits", remove_when="SGLang has a metric for logits that are NaN")
_finite = FiniteLogits()


@FEATURE.around("sglang.srt.utils.async_probe.sanitize_nan_logits")
def sanitize(original: Callable[..., None], logits: torch.Tensor, msg: str = "") -> None:
    """Make the logits finite, and add the rows with a NaN to the metric, in each rank."""
    found = _counter()
    if found is None:
        original(logits, msg)
    elif rows := _finite.make(logits):
        found.inc(rows)


@cache
def _counter() -> Counter | None:
    """Return the metric; None if the operator turned SGLang's function off, or asked for its assertions."""
    if not envs.SGLANG_SANITIZE_NAN_LOGITS.get() or envs.SGLANG_ENABLE_ASYNC_ASSERT.get():
        return None
    return counter("kimi_nan_logits_total", "Rows of logits that held a NaN, over all ranks.")

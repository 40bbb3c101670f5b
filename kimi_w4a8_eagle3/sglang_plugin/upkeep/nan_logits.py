"""Count logits that are NaN before SGLang makes them finite: a broken tensor or kernel otherwise looks like an answer.

`failing_requests` sets SGLANG_SANITIZE_NAN_LOGITS. With it, a model that computes NaN answers "" with status 200.
"""

from __future__ import annotations

import torch

from ..hooks import Feature, counter

FEATURE = Feature("the count of NaN logits", remove_when="SGLang has a metric for logits that are NaN")


class _Rows:
    """Number of rows with a NaN, counted on the device and read after the copy ended, so that no step waits for it."""

    def __init__(self) -> None:
        self._found: torch.Tensor | None = None
        self._host = torch.zeros(1, dtype=torch.int64)
        self._copied: torch.cuda.Event | None = None
        self._reported = 0

    def add(self, logits: torch.Tensor) -> int:
        """Count the rows of `logits` [rows, vocabulary]; return how many are new since the last call."""
        if self._found is None:
            self._found = torch.zeros(1, dtype=torch.int64, device=logits.device)
            self._host = torch.zeros(1, dtype=torch.int64, pin_memory=logits.is_cuda)
            self._copied = torch.cuda.Event() if logits.is_cuda else None
        self._found += logits.amax(-1).isnan().sum()  # amax keeps NaN and makes no tensor of the logits' size
        seen = self._reported
        if self._copied is None:
            seen = int(self._found)
        elif self._copied.query():  # True before the first copy, too
            seen = int(self._host)
            self._host.copy_(self._found, non_blocking=True)
            self._copied.record()
        new, self._reported = seen - self._reported, seen
        return new


_rows = _Rows()


@FEATURE.before("sglang.srt.utils.async_probe.sanitize_nan_logits")
def count(logits: torch.Tensor, *_: object, **__: object) -> None:
    """Add the rows with a NaN to the metric, in each rank."""
    found = counter("kimi_nan_logits_total", "Rows of logits that held a NaN, over all ranks.")
    found.inc(_rows.add(logits))

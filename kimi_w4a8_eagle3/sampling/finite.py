"""Make logits finite and count the rows that held a NaN, in one pass over them.

Infinite logits become +-1e30, as in SGLang's `sanitize_nan_logits`: a division by a small temperature leaves those
finite. A NaN becomes -1e30.
"""

from __future__ import annotations

import math

import torch


class FiniteLogits:
    """The count of rows with a NaN. On a device it is read one call late, so that no call waits for it."""

    def __init__(self) -> None:
        self._found = self._host = self._last = torch.zeros(1, dtype=torch.int64)
        self._calls, self._reported = 0, 0

    def make(self, logits: torch.Tensor) -> int:
        """Make `logits` [rows, vocabulary] finite in place; return the number of new rows with a NaN."""
        if logits.device.type == "cpu":
            return make_finite(logits)
        from .triton_finite import launch  # start-up: Triton, which a CPU does not need

        if len(self._last) < len(logits):
            self._last = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
        if self._found.device != logits.device:
            self._found = torch.zeros(1, dtype=torch.int64, device=logits.device)
            self._host = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._calls += 1
        launch(logits, self._last, self._found, self._calls)
        self._host.copy_(self._found, non_blocking=True)
        seen = int(self._host)  # read once: the copy may land at any time
        new, self._reported = seen - self._reported, seen
        return new


def make_finite(logits: torch.Tensor) -> int:
    """Make logits on a CPU finite in place; return the rows with a NaN. The kernel is tested against this definition.

    A sum that is finite has finite terms, so such logits are only read.
    """
    if math.isfinite(logits.numpy().sum() if logits.dtype == torch.float32 else logits.sum()):
        return 0
    rows = int(logits.isnan().any(-1).sum())
    torch.nan_to_num_(logits, nan=-1e30, posinf=1e30, neginf=-1e30)
    return rows

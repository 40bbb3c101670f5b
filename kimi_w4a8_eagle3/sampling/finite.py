"""Make logits finite and count the rows that held a NaN. On a GPU this is one pass over them.

Infinite logits become +-1e30, as in SGLang's `sanitize_nan_logits`: a division by a small temperature leaves those
finite. A NaN becomes -1e30.
"""

from __future__ import annotations

import math

import torch


class FiniteLogits:
    """The count of rows with a NaN. On a device it is read when its copy has arrived, so that no call waits for it."""

    def __init__(self) -> None:
        self._found = self._host = self._last = torch.zeros(1, dtype=torch.int64)
        self._copied: torch.cuda.Event | None = None
        self._calls, self._reported = 0, 0

    def make(self, logits: torch.Tensor) -> int:
        """Make `logits` [rows, vocabulary] finite in place; return rows with a NaN that no earlier call returned.

        On a device the number may be of earlier calls: this call's rows count when their copy has arrived.
        """
        if logits.is_cpu:
            return make_finite(logits)
        from .triton_finite import launch  # start-up: Triton, which a CPU does not need

        if self._copied is None:
            self._found = torch.zeros(1, dtype=torch.int64, device=logits.device)
            self._host = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        if self._copied is None or len(self._last) < len(logits):
            self._last = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
        self._calls += 1
        launch(logits, self._last, self._found, self._calls)
        return self._read()

    def _read(self) -> int:
        """Return what is new in the copy that has arrived, and ask for another one."""
        new = 0
        if self._copied is None:
            self._copied = torch.cuda.Event()
        elif not self._copied.query():
            return 0
        else:
            seen = int(self._host)
            new, self._reported = seen - self._reported, seen
        self._host.copy_(self._found, non_blocking=True)
        self._copied.record()
        return new


def make_finite(logits: torch.Tensor) -> int:
    """Make logits on a CPU finite in place; return the rows with a NaN. The kernel is tested against this definition.

    A sum that is finite has finite terms, so such logits are only read.
    """
    if math.isfinite(logits.sum()):
        return 0
    rows = int(logits.isnan().any(-1).sum())
    torch.nan_to_num_(logits, nan=-1e30, posinf=1e30, neginf=-1e30)
    return rows

"""Penalties and `min_tokens` at every position, also at those that a verify step draws at before it accepts drafts.

The state of a request is the count of each token that it has produced. It is a row of one table on the device and is
updated after every draw, so it is correct even when the scheduler has not seen the last results yet. A verify step adds
the drafts before a position to the counts of that position alone. Penalties count produced tokens, as SGLang's do, not
the prompt.

Everything that a pass needs lies on the device. It is copied there from pinned memory when the batch changes, so a pass
with the same requests as the one before copies nothing and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

_ROWS = 16  # rows by which a table grows: 10 MB with Kimi's vocabulary


@dataclass(frozen=True)
class Penalized:
    """Penalties that one request of a batch set.

    row: its place in the batch. counts: its row in the table. stops: the tokens that `min_new` forbids until that many
    tokens follow the `prompt` tokens. produced: the tokens that it has produced, where its counts must be made anew (at
    a prefill), otherwise None.
    """

    row: int
    counts: int
    frequency: float
    presence: float
    repetition: float
    min_new: int
    prompt: int
    stops: Sequence[int]
    produced: Sequence[int] | None


class CountTable:
    """Counts of produced tokens, int32 [rows, V], one row for each penalized request that is alive.

    The table has no row for a request without penalties, and grows with those that have one.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.counts = torch.zeros((0, size), dtype=torch.int32, device=device)
        self._rows: WeakKeyDictionary[object, int] = WeakKeyDictionary()

    def row(self, request: object) -> tuple[int, bool]:
        """Return the request's row, and True if it is new, so that its counts must be made."""
        if (known := self._rows.get(request)) is not None:
            return known, False
        taken = set(self._rows.values())
        row = next(row for row in range(len(taken) + 1) if row not in taken)
        self._rows[request] = row
        if row >= len(self.counts):
            self.counts = torch.cat([self.counts, self.counts.new_zeros((_ROWS, self.counts.shape[1]))])
        return row, True


class Penalties:
    """Penalties of the forward passes over one batch."""

    def __init__(self, table: CountTable, requests: Sequence[Penalized]) -> None:
        self._table, self.device = table, table.counts.device
        self._rows = self._sent([request.row for request in requests])
        self._count_rows = self._sent([request.counts for request in requests])
        weights = [(request.frequency, request.presence, request.repetition) for request in requests]
        self._weights = self._sent(weights, torch.float32)
        stops = [(i, token) for i, request in enumerate(requests) for token in request.stops if request.min_new]
        self._stops = self._sent(stops).view(-1, 2)
        # A stop is forbidden at positions before this one.
        self._first_stop = self._sent([request.prompt + request.min_new - 1 for request in requests])
        for request in requests:
            if request.produced is not None:
                self._restore(request.counts, request.produced)

    def _sent(self, values: Sequence[object], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Copy to the device without waiting for it."""
        host = torch.tensor(values, dtype=dtype, pin_memory=self.device.type != "cpu")
        return host.to(self.device, non_blocking=True)

    def _restore(self, row: int, produced: Sequence[int]) -> None:
        counts, tokens = self._table.counts[row], self._sent(produced)
        counts.zero_().index_add_(0, tokens, torch.ones_like(tokens, dtype=counts.dtype))

    def apply(self, logits: torch.Tensor, positions: torch.Tensor, chains: torch.Tensor | None = None) -> None:
        """Change logits in place as plain decoding would: penalties that add, the one that scales, `min_tokens`.

        logits: float32 [B * n, V]. positions: int64 [B * n], the index of each row's input token in its sequence.
        chains: [B, n], the tokens of a verify step, of which the first is produced already; None for n = 1.
        """
        n, drafts = (1, None) if chains is None else (chains.shape[1], chains[self._rows].long())
        given = logits, n, self._rows, self._table.counts, self._count_rows, self._weights, drafts
        if logits.device.type != "cpu":
            from .triton_penalties import launch  # start-up: Triton, which a CPU does not need

            launch(*given)
        else:
            penalize(*given)
        if len(self._stops):
            request, token = self._stops.T
            row, batch = self._rows[request], logits.view(-1, n, logits.shape[1])
            early = positions.view(-1, n)[row] < self._first_stop[request, None]  # [stops, n]
            batch[row, :, token] = batch[row, :, token].masked_fill(early, float("-inf"))

    def count(self, tokens: torch.Tensor) -> None:
        """Count drawn tokens. tokens: [B] or [B, n], -1 where a verify step accepted nothing more."""
        mine = tokens.view(len(tokens), -1)[self._rows].long()
        rows, counts = self._count_rows[:, None].expand_as(mine), self._table.counts
        counts.index_put_((rows, mine.clamp(min=0)), (mine >= 0).to(counts.dtype), accumulate=True)


def penalize(
    logits: torch.Tensor,
    n: int,
    rows: torch.Tensor,
    counts: torch.Tensor,
    count_rows: torch.Tensor,
    weights: torch.Tensor,
    drafts: torch.Tensor | None,
) -> None:
    """Penalize in torch; the kernel of `triton_penalties` is tested against this definition.

    logits: float32 [B * n, V], changed in place. rows: int64 [k], the penalized requests of the batch. counts: int32
    [rows, V]. count_rows: int64 [k]. weights: float32 [k, 3], frequency, presence, repetition. drafts: int64 [k, n].
    """
    own = counts[count_rows][:, None].expand(-1, n, -1)  # [k, n, V]
    if drafts is not None and n > 1:
        own = own.clone()
        for i in range(1, n):
            index = drafts[:, i, None, None].expand(-1, n - i, 1)
            own[:, i:].scatter_add_(2, index, torch.ones_like(index, dtype=own.dtype))
    batch = logits.view(-1, n, logits.shape[1])
    frequency, presence, repetition = weights.T[:, :, None, None]
    seen = own > 0
    mine = batch[rows] - (frequency * own + presence * seen)
    scale = torch.where(seen, repetition, 1.0)
    batch[rows] = torch.where(mine < 0, mine * scale, mine / scale)

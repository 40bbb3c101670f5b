"""Penalties and `min_tokens` at every position, also at those that a verify step draws at before it accepts drafts.

The state of a request is the count of each token that it has produced. It is a row of one table on the device and is
updated after every draw, so it is correct even when the scheduler has not seen the last results yet. A verify step adds
the drafts before a position to the counts of that position alone. Penalties count produced tokens, as SGLang's do, not
the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Penalized:
    """Penalties that one request of a batch set. row: its place in the batch.

    produced: the tokens that it has produced, where the state must be rebuilt (at a prefill), otherwise None.
    stops: the tokens that `min_new` forbids until that many tokens follow the `prompt` tokens.
    """

    row: int
    frequency: float
    presence: float
    repetition: float
    min_new: int
    prompt: int
    stops: Sequence[int]
    produced: Sequence[int] | None


class Penalties:
    """Penalties of one forward pass.

    table: int32 [slots, V] on the device of the logits, shared by all passes. slots: int64 [B], the row of the table of
        each request of the batch.
    """

    def __init__(self, table: torch.Tensor, slots: torch.Tensor, requests: Sequence[Penalized]) -> None:
        self._table = table
        device = table.device
        self._rows = torch.tensor([request.row for request in requests], device=device)
        self._slots = slots[self._rows].long()
        weights = [(request.frequency, request.presence, request.repetition) for request in requests]
        self._weights = torch.tensor(weights, dtype=torch.float32, device=device).T[:, :, None, None]
        stops = [(i, token) for i, request in enumerate(requests) for token in request.stops if request.min_new]
        self._stops = torch.tensor(stops, dtype=torch.long, device=device).view(-1, 2)
        # A stop is forbidden at positions before this one.
        first = [request.prompt + request.min_new - 1 for request in requests]
        self._first_stop = torch.tensor(first, device=device)
        self._restore(requests)

    def _restore(self, requests: Sequence[Penalized]) -> None:
        for slot, request in zip(self._slots, requests, strict=True):
            if request.produced is not None:
                tokens = torch.tensor(request.produced, dtype=torch.long, device=self._table.device)
                self._table[slot] = torch.bincount(tokens, minlength=self._table.shape[1]).to(self._table.dtype)

    def apply(self, logits: torch.Tensor, positions: torch.Tensor, chains: torch.Tensor | None = None) -> None:
        """Change logits in place as plain decoding would: penalties that add, the one that scales, `min_tokens`.

        logits: float32 [B * n, V]. positions: int64 [B * n], the index of each row's input token in its sequence.
        chains: [B, n], the tokens of a verify step, of which the first is produced already; None for n = 1.
        """
        n = 1 if chains is None else chains.shape[1]
        counts = self._table[self._slots][:, None].expand(-1, n, -1)  # [k, n, V]
        if chains is not None and n > 1:
            counts = counts.clone()
            drafts = chains[self._rows].long()
            for i in range(1, n):
                index = drafts[:, i, None, None].expand(-1, n - i, 1)
                counts[:, i:].scatter_add_(2, index, torch.ones_like(index, dtype=counts.dtype))
        mine = logits.view(-1, n, logits.shape[1])[self._rows]
        frequency, presence, repetition = self._weights
        seen = counts > 0
        mine -= frequency * counts + presence * seen
        scale = torch.where(seen, repetition, 1.0)
        mine = torch.where(mine < 0, mine * scale, mine / scale)
        self._forbid_stops(mine, positions.view(-1, n)[self._rows])
        logits.view(-1, n, logits.shape[1])[self._rows] = mine

    def _forbid_stops(self, logits: torch.Tensor, positions: torch.Tensor) -> None:
        """Forbid each stop of a request at each of its n positions. logits: [k, n, V], positions: [k, n]."""
        if len(self._stops):
            request, token = self._stops.T
            early = positions[request] < self._first_stop[request, None]  # [stops, n]
            logits[request, :, token] = logits[request, :, token].masked_fill(early, float("-inf"))

    def count(self, tokens: torch.Tensor) -> None:
        """Count drawn tokens. tokens: [B] or [B, n], -1 where a verify step accepted nothing more."""
        mine = tokens.view(len(tokens), -1)[self._rows].long()
        slots = self._slots[:, None].expand_as(mine)
        self._table.index_put_((slots, mine.clamp(min=0)), (mine >= 0).to(self._table.dtype), accumulate=True)

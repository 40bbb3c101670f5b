"""Time of one prefill batch or decode step of an engine.

A rank is one scheduler with its requests: one per engine, or one per DP rank. All ranks of an engine step together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .machine_model import PRECISIONS, Cluster, decode_bytes, prefill_pass, speculative_step
from .predict import Fit

Extend = tuple[float, float]  # new tokens of a request, and its cached or computed tokens before them
_W4A8 = PRECISIONS["w4a8"]
Decode = tuple[int, float]  # requests of a rank, and the sum of their contexts in tokens


class StepTime(Protocol):
    """Seconds of an engine's steps."""

    def prefill(self, ranks: Sequence[Sequence[Extend]]) -> float: ...
    def decode(self, ranks: Sequence[Decode]) -> float: ...


@dataclass(frozen=True)
class KimiStepTime:
    """Steps of Kimi-K2.5 by the fitted machine model. scale: factor on every time, for intervals."""

    fit: Fit
    cluster: Cluster
    steps: int = 3
    scale: float = 1.0

    def prefill(self, ranks: Sequence[Sequence[Extend]]) -> float:
        """Return the time of a pass. A short one takes at least a pass over the weights."""
        work = prefill_pass(ranks, _W4A8, self.cluster)
        tokens = sum(new for rank in ranks for new, _ in rank)
        weights = decode_bytes(1, tokens, 0.0, _W4A8, self.cluster)
        read = np.array([self.cluster.shapes.layers, weights / self.cluster.bandwidth, 0.0])
        return max(float(terms @ self.fit.vector) for terms in (work, read)) * self.scale

    def decode(self, ranks: Sequence[Decode]) -> float:
        """Return the time of the draft's steps and the verify step. The rank with the longest contexts decides."""
        total, (fullest, contexts) = sum(requests for requests, _ in ranks), max(ranks, key=lambda rank: rank[1])
        context = contexts / fullest
        step = speculative_step(total, self.steps, context, _W4A8, self.cluster, fullest)
        return float(step @ self.fit.vector) * self.scale

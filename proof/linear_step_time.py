"""Step times of the built-in model on a CPU, fitted to answers with SGLang's own clocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from kimi_w4a8_lab.predict.step_time import Decode, Extend

CHUNK = 1024  # tokens of a prefill


@dataclass(frozen=True)
class LinearStepTime:
    """Steps of a small model: fixed seconds, and seconds by new token, by pair of tokens, by request and by context."""

    prefill_s: float
    new_s: float
    pair_s: float
    decode_s: float
    request_s: float
    context_s: float

    def prefill(self, ranks: Sequence[Sequence[Extend]]) -> float:
        """Return the time of all ranks' tokens."""
        parts = [(new, new * (past + new / 2)) for rank in ranks for new, past in rank]
        work = sum(self.new_s * new + self.pair_s * pairs for new, pairs in parts)
        return self.prefill_s + work

    def decode(self, ranks: Sequence[Decode]) -> float:
        """Return the time of all ranks' requests."""
        work = sum(self.request_s * requests + self.context_s * contexts for requests, contexts in ranks)
        return self.decode_s + work


@dataclass(frozen=True)
class Answered:
    """One measured request: tokens, and Unix times. dispatched: to the scheduler. began, prefilled: of its prefill."""

    prompt: int
    cached: int
    output: int
    verifies: int
    sent: float
    dispatched: float
    began: float
    prefilled: float
    first: float
    end: float

    @property
    def new(self) -> int:
        return self.prompt - self.cached

    @property
    def tpot_s(self) -> float:
        return (self.end - self.first) / max(self.output - 1, 1)


@dataclass(frozen=True)
class Fitted:
    """Step times, accept length, and seconds of the requests outside of the scheduler."""

    steps: LinearStepTime
    accept: float
    outside_s: Sequence[float]


def fit(engines: Sequence[Sequence[Answered]]) -> Fitted:
    """Fit the model to the answers of traces that no comparison has, by engine."""
    prefills, decodes, outside = [], [], []
    for found in engines:
        by_start = groupby(sorted(found, key=lambda one: one.began), key=lambda one: one.began)
        batches = [list(batch) for _, batch in by_start]
        spans = [(batch[0].began, max(one.prefilled for one in batch)) for batch in batches]
        for batch, (began, end) in zip(batches, spans, strict=True):
            chunked = any(first < began < last for first, last in spans)
            if sum(one.new for one in batch) <= CHUNK and not chunked:
                pairs = sum(one.new * (one.cached + one.new / 2) for one in batch)
                prefills.append((1.0, sum(one.new for one in batch), pairs, end - began))
        for one in found:
            outside.append(one.dispatched - one.sent + one.first - one.prefilled)
            length = one.end - one.first
            own = length - sum(_overlap(one, span) for span in spans)
            beside = [(_overlap(one, (other.first, other.end)) / length, other) for other in found]
            requests = sum(share for share, _ in beside)
            context = sum(share * (other.prompt + other.output / 2) for share, other in beside)
            if one.verifies > 4:
                decodes.append((1.0, requests, context, own / one.verifies))
    coefficients = [_least(np.array(rows)) for rows in (prefills, decodes)]
    every = [one for found in engines for one in found]
    accept = sum(one.output - 1 for one in every) / sum(one.verifies for one in every)
    return Fitted(LinearStepTime(*coefficients[0], *coefficients[1]), accept, outside)


def _overlap(one: Answered, span: tuple[float, float]) -> float:
    """Return the seconds of a span in which the request decodes."""
    return max(min(one.end, span[1]) - max(one.first, span[0]), 0.0)


def _least(rows: np.ndarray) -> list[float]:
    """Return coefficients, none below zero, that fit the last column by relative error.

    Errors are relative to the fitted times. If they were relative to the measured ones, a time that noise has made
    longer would weigh less, and the fit would be too short.
    """
    from scipy.optimize import nnls

    times = fitted = rows[:, -1]
    for _ in range(8):
        found = nnls(rows[:, :-1] / fitted[:, None], times / fitted)[0]
        fitted = rows[:, :-1] @ found
    return [float(value) for value in found]

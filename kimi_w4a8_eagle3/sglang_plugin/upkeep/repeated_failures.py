"""Tell an engine that fails at one kind of work from a request that fails alone.

A verify step that fails for every sampled request is a broken engine, also if prefills and greedy batches succeed. So a
failure is forgotten only after a pass of the same mode that held all that the failing batches had in common.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..hooks import counter

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


@dataclass
class _Run:
    """Batches that failed with one error, and what they had in common."""

    count: int
    common: frozenset[str]


class RepeatedFailures:
    """Failed batches in a row, by mode of the pass and type of the error."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, str], _Run] = {}

    def failed(self, mode: str, features: frozenset[str], error: str) -> int:
        """Add a failed batch, and return how many have failed with this error in a row."""
        run = self._runs.setdefault((mode, error), _Run(0, features))
        run.count, run.common = run.count + 1, run.common & features
        return run.count

    def passed(self, batch: ScheduleBatch) -> None:
        """Forget the failures that this batch would have met."""
        if self._runs and batch.reqs:  # an engine without failures pays nothing, and an idle batch proves nothing
            mode, features = mode_of(batch), features_of(batch)
            held = [key for key, run in self._runs.items() if key[0] == mode and run.common <= features]
            for key in held:
                del self._runs[key]


def mode_of(batch: ScheduleBatch) -> str:
    """Return the kind of pass: "prefill", "verify" with its drafts, or "decode"."""
    if batch.forward_mode.is_extend() and not batch.forward_mode.is_target_verify():
        return "prefill"
    return "decode" if batch.spec_algorithm.is_none() else "verify"


def features_of(batch: ScheduleBatch) -> frozenset[str]:
    """Return what the requests of a batch ask of sampling."""
    return frozenset[str]().union(*map(_features, batch.reqs))


def _features(req: Req) -> set[str]:
    params = req.sampling_params
    penalties = (params.frequency_penalty, params.presence_penalty, params.repetition_penalty)
    asked = {
        "sampled": params.top_k > 1,  # SGLang's form of a temperature above 0
        "penalised": penalties != (0.0, 0.0, 1.0) or params.min_new_tokens > 0,
        "grammar": req.grammar is not None,
        "logprobs": req.return_logprob,
    }
    return {name for name, held in asked.items() if held}


def count(requests: int, place: str, error: Exception) -> None:
    """Add requests that ended by an error to the metric."""
    text = "Requests that failed inside the engine, by place (prefill, verify, ...) and type of the error."
    found = counter("kimi_failed_requests_total", text, "place", "error")
    found.labels(place=place, error=type(error).__name__).inc(requests)

"""Typed results of all evaluations, as result.json has them, and what they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from kimi_w4a8_eagle3.base.finding import Finding

from ..base.verdict import Verdict
from .comparison import Difference, Match, PrefillMatch, SamplingMatch
from .significance import ShareInterval
from .tasks import MARKER

CALLS = "tool_calls"
DIFFERING = ("problem", "question", "answer", "solved by", "this run", "baseline")
Status = Literal["answered", "truncated", "failed"]


@dataclass(frozen=True)
class ProblemOutcome:
    """One problem. extracted, correct: by metric. A failed request has no answer and counts in no accuracy.

    why_empty: cause of an answer without text.
    """

    id: int
    question: str
    target: str
    status: Status
    text: str
    extracted: dict[str, str]
    correct: dict[str, bool]
    completion_tokens: int | None
    attempts: int
    seconds: float
    error: str | None = None
    why_empty: str = ""

    @property
    def has_marker(self) -> bool:
        """True if the answer states its result after `####`, as the examples do."""
        return MARKER in self.text


@dataclass(frozen=True)
class Accuracy:
    """Accuracy over the answered problems; truncated answers count as scored."""

    metric: str
    correct: int
    answered: int
    interval: ShareInterval | None


@dataclass(frozen=True)
class Reference:
    """Accuracy reported elsewhere, measured on `n` problems.

    difference: this run's accuracy minus it, with its 90 % interval; the samples are independent.
    """

    configuration: str
    metric: str
    accuracy: float
    n: int
    source: str
    difference: ShareInterval | None = None


@dataclass(frozen=True)
class Paired:
    """One metric compared with the baseline over problems answered in both runs; differences are new minus base."""

    metric: str
    n: int
    both: int
    only_new: int
    only_base: int
    neither: int
    difference: ShareInterval
    mcnemar_p: float
    margin: float
    power: float
    needed: int

    @property
    def verdict(self) -> Verdict:
        """PASS, FAIL or INCONCLUSIVE at the margin."""
        return not_worse(self.difference, self.margin)


def not_worse(difference: ShareInterval, margin: float) -> Verdict:
    """Test non-inferiority: PASS if the 90 % interval lies above -margin, else FAIL if it lies below zero."""
    if difference.low > -margin:
        return Verdict.PASS
    return Verdict.FAIL if difference.high < 0 else Verdict.INCONCLUSIVE


@dataclass
class Conclusion:
    """Verdict of a run. `reasons` explains `state`, which is MEASURED until a finding judges it."""

    state: Verdict = Verdict.MEASURED
    reasons: list[str] = field(default_factory=list)

    def conclude(self, state: Verdict, *reasons: str) -> None:
        self.state = max(self.state, state, key=list(Verdict).index)
        self.reasons += reasons

    def judge(self, checks: Sequence[Finding]) -> None:
        """Fail for every check that did not pass."""
        for check in checks:
            if not check.passed:
                self.conclude(Verdict.FAIL, f"{check.name}: {check.found} (wanted {check.expected})")


@dataclass
class Judgement(Conclusion):
    """Conclusion with the accuracies and comparisons that led to it.

    differing: problems that only one side solves in at least one metric, with both answers, by the columns DIFFERING.
    """

    problems: int = 0
    failed: int = 0
    truncated: int = 0
    without_marker: int = 0
    empty: int = 0  # and not truncated
    accuracies: list[Accuracy] = field(default_factory=list)
    references: list[Reference] = field(default_factory=list)
    paired: list[Paired] = field(default_factory=list)
    differing: list[list[str]] = field(default_factory=list)


@dataclass(frozen=True)
class ToolOutcome:
    """One request and its answer. expected: the reference's finish_reason. problem: the error of its calls."""

    identity: str
    status: str
    expected: str | None
    finish_reason: str | None
    calls: list[dict[str, Any]]
    problem: str = ""
    marker: str = ""
    error: str | None = None

    @property
    def called(self) -> bool:
        """True if the answer ends in tool calls."""
        return self.finish_reason == CALLS


@dataclass(kw_only=True)
class LosslessReport(Conclusion):
    """Conclusion with the comparisons that led to it. matches: greedy answers first, then seeded and penalized ones."""

    prefill: PrefillMatch
    differences: list[Difference] = field(default_factory=list)
    matches: list[Match] = field(default_factory=list)
    accept_length: float | None = None
    sampling: SamplingMatch | None = None


@dataclass
class ExactReport(Conclusion):
    """Conclusion with the differing answers. seen: counts of what each server did, by its label."""

    compared: int = 0
    tokens: int = 0
    differences: list[Difference] = field(default_factory=list)
    seen: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass(kw_only=True)
class EvalResult:
    """result.json of an evaluation. configuration: the server's name. baseline: run that it was compared with.

    requests: asked, reused from before an interruption, retried. judged_against: published configuration that decides.
    meaning: what PASS says, where this is the same for every run.
    """

    title: ClassVar[str]
    meaning: ClassVar[str] = ""
    configuration: str
    model: str
    verdict: Conclusion
    requests: dict[str, int] = field(default_factory=dict)
    baseline: Path | None = None
    judged_against: str | None = None


@dataclass(kw_only=True)
class AccuracyResult(EvalResult):
    verdict: Judgement
    outcomes: list[ProblemOutcome]
    task: str
    lm_eval: dict[str, Any]
    kind: Literal["eval-accuracy"] = "eval-accuracy"
    title = "Accuracy"


@dataclass(kw_only=True)
class CheckedResult(EvalResult):
    checks: list[Finding]


@dataclass(kw_only=True)
class ToolsResult(CheckedResult):
    verdict: Judgement
    outcomes: list[ToolOutcome]
    kind: Literal["eval-tools"] = "eval-tools"
    title = "Tool calls"
    meaning = "every judged check holds, and tools are called as in the vendor's answers or the baseline"


@dataclass(kw_only=True)
class SmokeResult(CheckedResult):
    """Result of `eval smoke`. wanted: share of the problems that must be solved."""

    solved: int
    wanted: float
    problems: list[dict[str, Any]]
    kind: Literal["eval-smoke"] = "eval-smoke"
    title = "Smoke test"
    meaning = "every check holds"


@dataclass(kw_only=True)
class LosslessResult(EvalResult):
    verdict: LosslessReport
    reference: str
    prompts: list[dict[str, str]]
    texts: dict[str, dict[int, list[str]]]
    kind: Literal["eval-lossless"] = "eval-lossless"
    title = "Lossless speculation"
    meaning = "every token is the argmax of its own logits, and a prefill confirms it as well as without speculation"


@dataclass(kw_only=True)
class ExactResult(EvalResult):
    """Result of `eval lossless --exact`. asked: the requests. expected: the reference's texts."""

    verdict: ExactReport
    asked: list[dict[str, Any]]
    expected: list[str]
    kind: Literal["eval-exact"] = "eval-exact"
    title = "Lossless speculation, bit for bit"
    meaning = "tokens and logprobs are equal bit for bit, with no rule for ties"


RESULTS = (AccuracyResult, ToolsResult, SmokeResult, LosslessResult, ExactResult)

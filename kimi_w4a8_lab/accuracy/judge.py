"""Verdict on the outcomes of one run, alone, against reported accuracies and against a baseline run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kimi_w4a8_eagle3.base.resources import operator_dir

from ..base.verdict import Verdict
from . import significance
from .tasks import MARKER, METRICS

Status = Literal["answered", "truncated", "failed"]

_WORDS = {
    Verdict.PASS: "not worse",
    Verdict.FAIL: "worse",
    Verdict.INCONCLUSIVE: "too few problems to tell",
}


@dataclass(frozen=True)
class ProblemOutcome:
    """One problem. extracted, correct: by metric. A failed request has no answer and counts in no accuracy."""

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
    interval: significance.ShareInterval | None


@dataclass(frozen=True)
class Reference:
    """Accuracy reported elsewhere, measured on `n` problems."""

    configuration: str
    metric: str
    accuracy: float
    n: int
    source: str


@dataclass(frozen=True)
class AgainstReference:
    """This run's accuracy minus a reported one with its 90 % interval; the samples are independent."""

    reference: Reference
    difference: significance.ShareInterval
    verdict: Verdict


@dataclass(frozen=True)
class Paired:
    """One metric compared with the baseline over problems answered in both runs; differences are new minus base."""

    metric: str
    n: int
    both: int
    only_new: int
    only_base: int
    neither: int
    difference: significance.ShareInterval
    mcnemar_p: float
    margin: float
    power: float
    needed: int

    @property
    def verdict(self) -> Verdict:
        """PASS, FAIL or INCONCLUSIVE at the margin."""
        return not_worse(self.difference, self.margin)


@dataclass(frozen=True)
class Check:
    """One condition with its result in words."""

    name: str
    found: str
    wanted: str
    passed: bool

    def __str__(self) -> str:
        return f"{self.name}: {self.found} (wanted {self.wanted})"


@dataclass
class Conclusion:
    """Verdict of a run. `reasons` explains `state`, which is MEASURED until a finding judges it."""

    state: Verdict = Verdict.MEASURED
    reasons: list[str] = field(default_factory=list)

    def conclude(self, state: Verdict, *reasons: str) -> None:
        self.state = max(self.state, state, key=list(Verdict).index)
        self.reasons += reasons


@dataclass
class Judgement(Conclusion):
    """Conclusion with the accuracies and comparisons that led to it."""

    problems: int = 0
    failed: int = 0
    truncated: int = 0
    without_marker: int = 0
    empty: int = 0
    accuracies: list[Accuracy] = field(default_factory=list)
    references: list[AgainstReference] = field(default_factory=list)
    paired: list[Paired] = field(default_factory=list)
    differing: list[dict[str, object]] = field(default_factory=list)


def not_worse(difference: significance.ShareInterval, margin: float) -> Verdict:
    """Test non-inferiority: PASS if the 90 % interval lies above -margin, else FAIL if it lies below zero."""
    if difference.low > -margin:
        return Verdict.PASS
    return Verdict.FAIL if difference.high < 0 else Verdict.INCONCLUSIVE


def judge(
    outcomes: Sequence[ProblemOutcome],
    references: Sequence[Reference] = (),
    judged: str | None = None,
    baseline: Sequence[ProblemOutcome] | None = None,
    margin: float = 0.01,
    max_unusable: float = 0.01,
) -> Judgement:
    """Return the conclusion from one run.

    references: reported accuracies to show; the configuration named `judged` also decides. margin: accepted loss to
    the baseline. max_unusable: share of failed and truncated requests above which the run is invalid.
    """
    found = Judgement(
        problems=len(outcomes),
        failed=sum(o.status == "failed" for o in outcomes),
        truncated=sum(o.status == "truncated" for o in outcomes),
        without_marker=sum(bool(o.target) and o.status != "failed" and not o.has_marker for o in outcomes),
        empty=sum(o.status != "failed" and not o.text.strip() for o in outcomes),
    )
    judge_validity(found, max_unusable)
    answered = [o for o in outcomes if o.status != "failed"]
    for metric in _metrics(outcomes):
        correct = sum(o.correct[metric] for o in answered)
        interval = significance.wilson(correct, len(answered)) if answered else None
        found.accuracies.append(Accuracy(metric, correct, len(answered), interval))
    if answered:
        judge_references(found, references, judged)
    if baseline is not None:
        _judge_baseline(found, outcomes, baseline, margin)
    if found.state is Verdict.MEASURED:
        found.reasons.append("nothing to compare with: add --baseline RUN or --published NAME")
    return found


def _metrics(outcomes: Sequence[ProblemOutcome]) -> Sequence[str]:
    return list(outcomes[0].correct) if outcomes else METRICS


def load_references() -> list[Reference]:
    table = json.loads((operator_dir("eval") / "published.json").read_text())
    return [
        Reference(configuration, metric, value, table["problems"], entry["source"])
        for entry in table["reports"]
        for configuration, metrics in entry["accuracy"].items()
        for metric, value in metrics.items()
    ]


def judge_validity(found: Judgement, max_unusable: float) -> None:
    """Conclude INVALID if more than `max_unusable` of the requests failed or were truncated."""
    unusable = found.failed + found.truncated
    if unusable > max_unusable * found.problems:
        found.conclude(
            Verdict.INVALID,
            f"{found.failed} requests failed and {found.truncated} answers were cut at the token limit: "
            f"{unusable / found.problems:.1%} of {found.problems}, more than {max_unusable:.1%}",
        )
    if found.empty > max_unusable * found.problems:
        found.reasons.append(
            f"{found.empty} of {found.problems} answers are empty (scored as wrong): "
            "if the model needs its chat template, add --chat"
        )


def judge_references(found: Judgement, references: Sequence[Reference], judged: str | None) -> None:
    """Compare the run's accuracies with reported ones of the same metric; those of `judged` decide."""
    ours = {a.metric: a for a in found.accuracies}
    for reference in references:
        mine = ours[reference.metric]
        theirs = round(reference.accuracy * reference.n)
        difference = significance.share_difference(mine.correct, mine.answered, theirs, reference.n)
        compared = AgainstReference(reference, difference, not_worse(difference, significance.REPORTED_MARGIN))
        found.references.append(compared)
        if reference.configuration == judged:
            found.conclude(
                compared.verdict,
                f"{reference.metric}: {difference:+} against {judged}'s {reference.accuracy:.2%}, "
                f"margin {100 * significance.REPORTED_MARGIN:g} points: {_WORDS[compared.verdict]}",
            )


def _judge_baseline(
    found: Judgement, outcomes: Sequence[ProblemOutcome], baseline: Sequence[ProblemOutcome], margin: float
) -> None:
    earlier = {o.question: o for o in baseline if o.status != "failed"}
    pairs = [(o, earlier[o.question]) for o in outcomes if o.status != "failed" and o.question in earlier]
    if not pairs:
        found.conclude(Verdict.INVALID, "no problem was answered in both runs")
        return
    for metric in _metrics(outcomes):
        paired = _compare(pairs, metric, margin)
        found.paired.append(paired)
        found.conclude(
            paired.verdict,
            f"{metric}: {paired.difference:+} against the baseline, margin {100 * margin:g} points: "
            f"{_WORDS[paired.verdict]} "
            f"(power {paired.power:.0%} with {paired.n} problems; 80% needs about {paired.needed})",
        )
    found.differing = [_difference(new, base) for new, base in pairs if new.correct != base.correct]


def _compare(pairs: Sequence[tuple[ProblemOutcome, ProblemOutcome]], metric: str, margin: float) -> Paired:
    table = [(new.correct[metric], base.correct[metric]) for new, base in pairs]
    only_new, only_base, n = table.count((True, False)), table.count((False, True)), len(table)
    # One pair is added to the observed ones, so that identical runs do not promise certainty.
    discordance = (only_new + only_base + 1) / (n + 1)
    return Paired(
        metric=metric,
        n=n,
        both=table.count((True, True)),
        only_new=only_new,
        only_base=only_base,
        neither=table.count((False, False)),
        difference=significance.paired_interval(only_new, only_base, n),
        mcnemar_p=significance.mcnemar_p(only_new, only_base),
        margin=margin,
        power=significance.noninferiority_power(n, discordance, margin),
        needed=significance.problems_needed(discordance, margin),
    )


def _difference(new: ProblemOutcome, base: ProblemOutcome) -> dict[str, object]:
    """Return a problem that only one of two configurations solves in at least one metric."""
    solved_by = {m: "new" if new.correct[m] else "baseline" for m in new.correct if new.correct[m] != base.correct[m]}
    problem = {"id": new.id, "question": new.question, "target": new.target}
    return {**problem, "solved_by": solved_by, "new": new.text, "base": base.text}

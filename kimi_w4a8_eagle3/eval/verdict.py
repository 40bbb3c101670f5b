"""From the outcomes of one run, and perhaps of a baseline, to a verdict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..base.resources import operator_dir
from . import significance
from .outcomes import Outcome
from .tasks import METRICS

State = Literal["pass", "inconclusive", "fail", "invalid"]
_ORDER: tuple[State, ...] = ("pass", "inconclusive", "fail", "invalid")
EXIT_CODES: dict[State, int] = {"pass": 0, "fail": 3, "invalid": 4, "inconclusive": 5}


@dataclass(frozen=True)
class Accuracy:
    """Accuracy over the problems that have an answer (truncated ones count as scored)."""

    metric: str
    correct: int
    answered: int
    interval: significance.Interval | None


@dataclass(frozen=True)
class Reference:
    """An accuracy that somebody else reports, of `n` problems."""

    configuration: str
    metric: str
    accuracy: float
    n: int
    source: str


@dataclass(frozen=True)
class AgainstReference:
    """difference: ours minus theirs. p: chance of one as large between equal systems, as independent samples."""

    reference: Reference
    difference: float
    p: float

    @property
    def within_noise(self) -> bool:
        """True when the difference may be chance."""
        return self.p >= significance.ALPHA


@dataclass(frozen=True)
class Paired:
    """One metric against the baseline, over the problems that both runs answered; differences are new minus base."""

    metric: str
    n: int
    both: int
    only_new: int
    only_base: int
    neither: int
    difference: significance.Interval
    mcnemar_p: float
    margin: float
    power: float
    needed: int

    @property
    def state(self) -> State:
        """Not worse by the margin (pass), worse (fail), or too few problems to say."""
        if self.difference.low > -self.margin:
            return "pass"
        return "fail" if self.difference.high < 0 else "inconclusive"


@dataclass(frozen=True)
class Difference:
    """A problem that exactly one of two configurations solves, in at least one metric."""

    id: int
    question: str
    target: str
    solved_by: dict[str, str]
    new: str
    base: str


@dataclass
class Verdict:
    """Everything that is concluded from a run; `reasons` says in sentences what decided `state`."""

    state: State = "pass"
    reasons: list[str] = field(default_factory=list)
    problems: int = 0
    failed: int = 0
    truncated: int = 0
    without_marker: int = 0
    empty: int = 0
    accuracies: list[Accuracy] = field(default_factory=list)
    references: list[AgainstReference] = field(default_factory=list)
    paired: list[Paired] = field(default_factory=list)
    differing: list[Difference] = field(default_factory=list)

    def conclude(self, state: State, reason: str) -> None:
        """Add a finding; the worst one decides."""
        self.state = max(self.state, state, key=_ORDER.index)
        self.reasons.append(reason)

    @property
    def exit_code(self) -> int:
        """0 pass, 3 fail, 4 invalid, 5 inconclusive."""
        return EXIT_CODES[self.state]


def judge(
    outcomes: Sequence[Outcome],
    references: Sequence[Reference] = (),
    judged: str | None = None,
    baseline: Sequence[Outcome] | None = None,
    margin: float = 0.01,
    max_unusable: float = 0.01,
) -> Verdict:
    """The verdict of one run.

    references: reported accuracies to show; the one whose configuration is `judged` also decides. margin: loss that
    is still "not worse". max_unusable: share of failed and truncated requests above which the run is invalid.
    """
    verdict = Verdict(
        problems=len(outcomes),
        failed=sum(o.status == "failed" for o in outcomes),
        truncated=sum(o.status == "truncated" for o in outcomes),
        without_marker=sum(o.status != "failed" and not o.has_marker for o in outcomes),
        empty=sum(o.status != "failed" and not o.text.strip() for o in outcomes),
    )
    judge_validity(verdict, max_unusable)
    answered = [o for o in outcomes if o.status != "failed"]
    for metric in METRICS:
        correct = sum(o.correct[metric] for o in answered)
        interval = significance.wilson(correct, len(answered)) if answered else None
        verdict.accuracies.append(Accuracy(metric, correct, len(answered), interval))
    if answered:
        judge_references(verdict, references, judged)
    if baseline is not None:
        _judge_baseline(verdict, outcomes, baseline, margin)
    if verdict.state == "pass" and not (baseline or judged):
        verdict.reasons.append("measured; name a --baseline run or --published values for a comparison")
    return verdict


def load_references() -> list[Reference]:
    """The accuracies in `eval/published.json`."""
    table = json.loads((operator_dir("eval") / "published.json").read_text())
    return [
        Reference(configuration, metric, value, table["problems"], entry["source"])
        for entry in table["reports"]
        for configuration, metrics in entry["accuracy"].items()
        for metric, value in metrics.items()
    ]


def judge_validity(verdict: Verdict, max_unusable: float) -> None:
    """Conclude that a run is invalid when more than this share of its requests has no whole answer."""
    unusable = verdict.failed + verdict.truncated
    if unusable > max_unusable * verdict.problems:
        verdict.conclude(
            "invalid",
            f"{verdict.failed} requests failed and {verdict.truncated} answers were cut at the token limit: "
            f"{unusable / verdict.problems:.1%} of {verdict.problems}, more than {max_unusable:.1%}",
        )
    if verdict.empty > max_unusable * verdict.problems:
        verdict.reasons.append(
            f"{verdict.empty} of {verdict.problems} answers are empty (scored as wrong): does this model want --chat?"
        )


def judge_references(verdict: Verdict, references: Sequence[Reference], judged: str | None) -> None:
    """Compare the verdict's accuracies with reported ones of the same metric; those of `judged` decide."""
    ours = {a.metric: a for a in verdict.accuracies}
    for reference in references:
        mine = ours[reference.metric]
        theirs = round(reference.accuracy * reference.n)
        p = significance.two_shares_p(mine.correct, mine.answered, theirs, reference.n)
        found = AgainstReference(reference, mine.correct / mine.answered - reference.accuracy, p)
        verdict.references.append(found)
        if reference.configuration != judged:
            continue
        text = f"{reference.metric} is {found.difference:+.2%} from {judged}'s {reference.accuracy:.2%} (p = {p:.2g}): "
        if found.within_noise:
            verdict.conclude("pass", text + "within noise")
        else:
            higher = found.difference > 0
            verdict.conclude("pass" if higher else "fail", text + ("higher" if higher else "lower") + ", not noise")


def _judge_baseline(verdict: Verdict, outcomes: Sequence[Outcome], baseline: Sequence[Outcome], margin: float) -> None:
    earlier = {o.question: o for o in baseline if o.status != "failed"}
    pairs = [(o, earlier[o.question]) for o in outcomes if o.status != "failed" and o.question in earlier]
    if not pairs:
        verdict.conclude("invalid", "no problem was answered in both runs")
        return
    for metric in METRICS:
        paired = _compare(pairs, metric, margin)
        verdict.paired.append(paired)
        words = {"pass": "not worse", "fail": "worse", "inconclusive": "too few problems to tell"}[paired.state]
        verdict.conclude(
            paired.state,
            f"{metric}: {paired.difference.value:+.2%} [{paired.difference.low:+.2%}, {paired.difference.high:+.2%}] "
            f"against the baseline, margin {margin:.1%}: {words} "
            f"(power {paired.power:.0%} with {paired.n} problems; 80% takes about {paired.needed})",
        )
    verdict.differing = [_difference(new, base) for new, base in pairs if new.correct != base.correct]


def _compare(pairs: Sequence[tuple[Outcome, Outcome]], metric: str, margin: float) -> Paired:
    table = [(new.correct[metric], base.correct[metric]) for new, base in pairs]
    only_new, only_base, n = table.count((True, False)), table.count((False, True)), len(table)
    # One pair is added to what was seen, so that identical runs do not promise certainty.
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


def _difference(new: Outcome, base: Outcome) -> Difference:
    solved_by = {m: "new" if new.correct[m] else "baseline" for m in METRICS if new.correct[m] != base.correct[m]}
    return Difference(new.id, new.question, new.target, solved_by, new.text, base.text)

"""Verdict on the outcomes of one run, alone, against reported accuracies and against a baseline run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from kimi_w4a8_eagle3.base.installed import operator_dir

from ..base.verdict import Verdict
from . import significance
from .results import Accuracy, Judgement, Paired, ProblemOutcome, Reference, not_worse
from .tasks import METRICS

_WORDS = {Verdict.PASS: "not worse", Verdict.FAIL: "worse", Verdict.INCONCLUSIVE: "undecided, the interval allows both"}
_MORE = "; to decide it raise --limit, or give --baseline RUN of as many"


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
        without_marker=sum(o.status != "failed" and not o.has_marker for o in outcomes),
        empty=sum(o.status == "answered" and not o.text.strip() for o in outcomes),
    )
    judge_validity(found, max_unusable, [o.why_empty for o in outcomes if o.why_empty])
    answered = [o for o in outcomes if o.status != "failed"]
    for metric in METRICS:
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


def load_references() -> list[Reference]:
    table = json.loads((operator_dir("eval") / "published.json").read_text())
    return [
        Reference(configuration, metric, value, table["problems"], entry["source"])
        for entry in table["reports"]
        for configuration, metrics in entry["accuracy"].items()
        for metric, value in metrics.items()
    ]


def judge_validity(found: Judgement, max_unusable: float, causes: Sequence[str] = ()) -> None:
    """Conclude INVALID if more than `max_unusable` of the requests failed, were truncated or got no text.

    causes: of each answer without text; the most frequent one is shown.
    """
    unusable = found.failed + found.truncated + found.empty
    if unusable > max_unusable * found.problems:
        why = f". Without text: {max(causes, key=causes.count)}" if causes else ""
        found.conclude(
            Verdict.INVALID,
            f"{found.failed} requests failed, {found.truncated} answers were cut at the token limit and {found.empty} "
            f"are empty: {unusable / found.problems:.1%} of {found.problems}, more than {max_unusable:.1%}{why}",
        )


def judge_references(found: Judgement, references: Sequence[Reference], judged: str | None) -> None:
    """Compare the run's accuracies with reported ones of the same metric; those of `judged` decide."""
    ours = {a.metric: a for a in found.accuracies}
    for reference in references:
        mine = ours[reference.metric]
        theirs = round(reference.accuracy * reference.n)
        difference = significance.share_difference(mine.correct, mine.answered, theirs, reference.n)
        verdict = not_worse(difference, significance.REPORTED_MARGIN)
        found.references.append(replace(reference, difference=difference))
        if reference.configuration == judged:
            more = _MORE if verdict is Verdict.INCONCLUSIVE and not found.reasons else ""
            found.conclude(
                verdict,
                f"{reference.metric}: {difference:+} against {judged}'s {reference.accuracy:.2%}, "
                f"margin {100 * significance.REPORTED_MARGIN:g} points: {_WORDS[verdict]}{more}",
            )


def _judge_baseline(
    found: Judgement, outcomes: Sequence[ProblemOutcome], baseline: Sequence[ProblemOutcome], margin: float
) -> None:
    earlier = {o.question: o for o in baseline if o.status != "failed"}
    pairs = [(o, earlier[o.question]) for o in outcomes if o.status != "failed" and o.question in earlier]
    if not pairs:
        found.conclude(Verdict.INVALID, "no problem was answered in both runs")
        return
    for metric in METRICS:
        paired = _compare(pairs, metric, margin)
        found.paired.append(paired)
        found.conclude(
            paired.verdict,
            f"{metric}: {paired.difference:+} against the baseline, margin {100 * margin:g} points: "
            f"{_WORDS[paired.verdict]} "
            f"(power {paired.power:.0%} with {paired.n} problems; 80% needs about {paired.needed}: --limit)",
        )
    found.differing = [_difference(new, base) for new, base in pairs if new.correct != base.correct]


def _compare(pairs: Sequence[tuple[ProblemOutcome, ProblemOutcome]], metric: str, margin: float) -> Paired:
    table = [(new.correct[metric], base.correct[metric]) for new, base in pairs]
    only_new, only_base, n = table.count((True, False)), table.count((False, True)), len(table)
    # One pair is added to the observed ones, so that identical runs do not promise certainty.
    discordance = (only_new + only_base + 1) / (n + 1)
    return Paired(
        metric, n, table.count((True, True)), only_new, only_base, table.count((False, False)),
        difference=significance.paired_interval(only_new, only_base, n),
        mcnemar_p=significance.mcnemar_p(only_new, only_base),
        margin=margin,
        power=significance.noninferiority_power(n, discordance, margin),
        needed=significance.problems_needed(discordance, margin),
    )  # fmt: skip


def _difference(new: ProblemOutcome, base: ProblemOutcome) -> list[str]:
    """Return a row of `Judgement.differing`."""
    sides = {metric: "new" if new.correct[metric] else "baseline" for metric in METRICS}
    solved_by = [f"{metric}: {side}" for metric, side in sides.items() if new.correct[metric] != base.correct[metric]]
    return [str(new.id), new.question, new.target, ", ".join(solved_by), new.text, base.text]

"""Content of an evaluation's page: verdict with its reasons, accuracies beside reported ones, checks, differences."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.finding import Finding

from ..accuracy.results import (
    DIFFERING,
    Accuracy,
    AccuracyResult,
    CheckedResult,
    EvalResult,
    ExactResult,
    Judgement,
    LosslessResult,
    Reference,
    SmokeResult,
    ToolsResult,
)
from ..accuracy.significance import REPORTED_MARGIN, ShareInterval, wilson
from ..base.run_folder import RunFolder
from ..base.verdict import Verdict
from ..speed.statistics import Interval
from .page import Bar, Page, Picture, Section, Table, Tone, Words

TONES: dict[Verdict | None, Tone] = dict.fromkeys((Verdict.SLOW, Verdict.FAIL, Verdict.INVALID), "worse")
TONES[Verdict.PASS] = "better"
_ACCURACIES = ("metric", "solved", "measured [95%]", "published [95%]", "by", "difference [90%]", "source")
_SOLVED = ("both solve", "only this run", "only the baseline", "neither")
_CHECKS = ("check", "found", "wanted", "result")
_PAIRED = ("metric", *_SOLVED, "difference [90%]", "McNemar p", "power")
_DIFFERENCE = ("server", "concurrency", "request", "kind", "token", "what differs")


def page(folder: Path, result: EvalResult) -> Page:
    verdict, task = result.verdict, result.task if isinstance(result, AccuracyResult) else result.title
    meaning = f"PASS means: {found}." if (found := _meaning(result)) else ""
    about = " ".join(filter(None, (f"{folder.resolve().name} of {result.model}.", meaning, _versions(folder))))
    head = f"{verdict.state.headline}: {task}, {result.configuration}"
    words, tone = [Words(reason) for reason in verdict.reasons], TONES.get(verdict.state, "")
    return Page(head, words, about, chart(*_bars(result)), sections=list(_sections(result)), tone=tone)


def _sections(result: EvalResult) -> Iterator[Section]:
    judged = result.verdict if isinstance(result.verdict, Judgement) else Judgement()
    rows = [row for accuracy in judged.accuracies for row in _accuracy(accuracy, judged.references)]
    yield Section("Measured and published", tables=[Table(_ACCURACIES, rows)])
    yield Section("Requests", tables=[_counts(result)])
    if isinstance(result, CheckedResult):
        yield Section("Checks", tables=[Table(_CHECKS, [_check(check) for check in result.checks])])
    if isinstance(result, ExactResult):
        counts = [{"server": label, **done} for label, done in result.verdict.seen.items()]
        yield Section("What the servers did", tables=[_table(counts)])
    solved = [
        [pair.metric, *map(str, (pair.both, pair.only_new, pair.only_base, pair.neither)),
         format(pair.difference, "+"), f"{pair.mcnemar_p:.3g}", f"{pair.power:.3g}"]
        for pair in judged.paired
    ]  # fmt: skip
    yield Section("Against the baseline, problem by problem", tables=[Table(_PAIRED, solved)])
    if isinstance(result, ToolsResult):
        wrong: list[list[str | Words]] = [
            [one.problem, Words(json.dumps(one.calls), literal=True)] for one in result.outcomes if one.problem
        ]
        table = Table(("what is wrong", "the calls"), wrong)
        yield Section("Calls that do not fit their schema", tables=[table], closed=True)
    yield Section("Problems that only one side solves", tables=[Table(DIFFERING, judged.differing)], closed=True)
    if isinstance(result, (LosslessResult, ExactResult)):
        table = Table(_DIFFERENCE, [list(map(str, asdict(one).values()))[:6] for one in result.verdict.differences])
        yield Section("Answers that differ", tables=[table], closed=True)


def _accuracy(found: Accuracy, references: Sequence[Reference]) -> Iterator[list[str | Words]]:
    """Yield a row of one metric for each reported accuracy, or one row without any."""
    ours = [found.metric, f"{found.correct} of {found.answered}", str(found.interval or "")]
    compared = [reference for reference in references if reference.metric == found.metric]
    for reference in compared:
        theirs, apart = f"{_share(reference)} of {reference.n}", f"{reference.difference:+}"
        yield [*ours, theirs, reference.configuration, apart, Words(reference.source, "soft")]
    if not compared:
        yield [*ours, "", "", "", ""]


def _counts(result: EvalResult) -> Table:
    counts = dict(result.requests)
    if isinstance(judged := result.verdict, Judgement):
        names = ("problems", "failed", "truncated", "without_marker", "empty")
        counts = {name.replace("_", " "): getattr(judged, name) for name in names} | counts
    if isinstance(result, ToolsResult):
        ended = Counter(str(outcome.finish_reason) for outcome in result.outcomes)
        counts |= {f"ended with {reason}": count for reason, count in ended.items()}
    return _table([counts] if counts else [])


def _table(rows: Sequence[Mapping[str, object]]) -> Table:
    return Table(list(rows[0]) if rows else [], [list(map(str, row.values())) for row in rows])


def _check(check: Finding) -> list[str | Words]:
    passed = Words("passed", "better") if check.passed else Words("failed", "worse")
    return [check.name, check.found, check.expected, passed]


def _bars(result: EvalResult) -> tuple[str, list[Bar]]:
    """Return what the chart shows: shares, in percent, beside the reported, wanted or reference's ones."""
    if isinstance(result, SmokeResult):
        solved = wilson(result.solved, len(result.problems))
        wanted = Interval(100 * result.wanted, None, None)
        name = "problems solved"
        return f"{name} (%)", [_bar(name, result.configuration, solved), Bar(name, "at least", False, wanted)]
    if isinstance(result, LosslessResult):
        bars = []
        for match in result.verdict.matches:
            same, own = (match.answers - match.differing, match.answers), (match.prompts - match.own, match.prompts)
            for side, counts in ((result.configuration, same), (f"{result.reference} in other batches", own)):
                bars.append(_bar(match.kind, side, wilson(*counts)))
        return "answers with the tokens of the reference (%)", bars
    judged = result.verdict if isinstance(result.verdict, Judgement) else Judgement()
    bars = [_bar(one.metric, result.configuration, one.interval) for one in judged.accuracies if one.interval]
    bars += [_bar(one.metric, one.configuration, _share(one), published=True) for one in judged.references]
    return "share solved (%)", bars


def _bar(group: str, side: str, share: ShareInterval, published: bool = False) -> Bar:
    return Bar(group, side, published, Interval(100 * share.value, 100 * share.low, 100 * share.high))


def chart(name: str, bars: list[Bar]) -> Picture | None:
    """Draw bars; None without any, or without matplotlib."""
    if not bars or find_spec("matplotlib") is None:
        return None
    from .plots import panel  # optional: matplotlib

    return panel("lead", name, bars)


def _share(reference: Reference) -> ShareInterval:
    return wilson(round(reference.accuracy * reference.n), reference.n)


def _meaning(result: EvalResult) -> str:
    """Return the meaning of PASS in a sentence; empty when nothing was compared."""
    if result.meaning:
        return result.meaning
    margins = {f"{pair.margin * 100:g}" for pair in getattr(result.verdict, "paired", ())}
    if margins:
        return f"not worse: the 90% interval of the difference to the baseline lies above -{', '.join(margins)} points"
    if result.judged_against:
        margin = REPORTED_MARGIN * 100
        return f"the 90% interval of the difference to what was reported lies above -{margin:g} points"
    return ""


def _versions(folder: Path) -> str:
    """Return time, machine, packages and commit of the run's record; empty without a record."""
    try:
        record = RunFolder[object].resume(folder).record
    except KimiError:
        return ""
    packages = [f"{name} {version}" for name, version in record.get("versions", {}).items()]
    commit = f"commit {record['git_commit'][:12]}" if record.get("git_commit") else ""
    machine = "asked from {processor}, {cores} cores".format_map(record["machine"]) if "machine" in record else ""
    return ", ".join(filter(None, [record.get("started"), machine, *packages, commit]))

"""Claims of docs/verified.md that a run on GPUs can settle (`claims.json`), and the page and bundle of a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kimi_w4a8_eagle3.base.finding import Severity

from ..report.evaluation import chart
from ..report.page import Page, Picture, Section, Table, Tone, Words
from ..speed.statistics import METRICS, Interval
from .journal import AcceptResult, StageResult


@dataclass(frozen=True)
class Claim:
    """The part of a claim that is not proved without a GPU, and the stages that settle it.

    settled_by: values of `Stage.proves`. otherwise: why no stage settles it.
    """

    what: str
    left_open: str
    settled_by: Sequence[str] = ()
    otherwise: str = ""


_WORDS = {
    Severity.SKIP: Words("not run", "soft"),
    Severity.OK: Words("passed", "better"),
    Severity.FAIL: Words("failed", "worse"),
}
CLAIMS = [Claim(**row) for row in json.loads(Path(__file__).with_name("claims.json").read_text())]
_CLAIMED = ("what", "not proved without a GPU", "now", "found")


def settled(claim: Claim, results: Mapping[str, StageResult]) -> tuple[Severity, str]:
    """Return OK if all stages of the claim passed, FAIL if one failed, SKIP if one did not run, and the reason."""
    found = [result for result in results.values() if result.proves in claim.settled_by]
    for severity in (Severity.FAIL, Severity.SKIP):
        for result in found:
            if result.severity is severity:
                return severity, result.found
    if not claim.settled_by or set(claim.settled_by) - {result.proves for result in found}:
        return Severity.SKIP, claim.otherwise or "not in this run: accept --full"
    return Severity.OK, "; ".join(dict.fromkeys(result.found for result in found))


def page(run: AcceptResult) -> Page:
    """Return the page: the verdict, the stages with their figures, and a row for each claim."""
    stage_rows, figures, claims, words = list[list[str | Words]](), list[list[str]](), list[list[str | Words]](), []
    for name, result in run.stages.items():
        stage_rows.append([name, _WORDS[result.severity], f"{result.seconds:.0f}", Words(result.found, literal=True)])
        for figure in result.figures:
            values = (figure.value, figure.predicted, figure.published)
            cells = ("" if value is None else f"{value:.4g} {figure.unit}" for value in values)
            figures.append([name, figure.name, *cells])
        if result.severity is Severity.FAIL:
            words.append(Words(f"{name}: {result.found.splitlines()[0]}", "worse"))
    for claim in CLAIMS:
        severity, found = settled(claim, run.stages)
        claims.append([claim.what.replace("`", ""), claim.left_open.replace("`", ""), _WORDS[severity], found])
    sections = [
        Section("Figures", tables=[Table(("stage", "figure", "measured", "predicted", "published"), figures)]),
        Section("Stages", tables=[Table(("stage", "verdict", "s", "found"), stage_rows)]),
        Section("What this run settles", tables=[Table(_CLAIMED, claims)]),
    ]
    about = ", ".join(f"{name} {value}" for name, value in run.identity.items())
    reasons = words or [Words("No stage failed.", "better")]
    tone: Tone = "worse" if words else "better" if run.accepted else ""
    return Page(run.headline, reasons, about, _chart(run), sections=sections, tone=tone)


def _chart(run: AcceptResult) -> Picture | None:
    """Draw TPOT beside prediction and published value; before any is measured, the time of each stage."""
    bars, times = [], []
    for name, result in run.stages.items():
        times.append((name, _WORDS[result.severity].text, False, Interval(result.seconds, None, None)))
        for figure in (figure for figure in result.figures if figure.name == METRICS["tpot_median_ms"].title):
            values = {"measured": figure.value, "predicted": figure.predicted, "published": figure.published}
            known = {side: Interval(value, None, None) for side, value in values.items() if value is not None}
            bars += [(name, side, side == "published", value) for side, value in known.items()]
    return chart("TPOT median (ms)", bars) or chart("time of each stage (s)", [time for time in times if time[3].value])


def write_bundle(folder: Path) -> Path:
    return Path(shutil.make_archive(str(folder), "gztar", folder.parent, folder.name))

"""Claims of docs/verified.md that a run on GPUs can settle (`claims.json`), and the page and bundle of a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..base.verdict import Verdict
from ..report.evaluation import TONES, chart
from ..report.page import Bar, Page, Picture, Section, Table, Tone, Words
from ..speed.statistics import METRICS, Interval
from .journal import DONE, REFUSED, WORDS, AcceptResult, StageResult


@dataclass(frozen=True)
class Claim:
    """The part of a claim that is not proved without a GPU, and the stages that settle it.

    settled_by: values of `Stage.proves`. otherwise: why no stage settles it.
    """

    what: str
    left_open: str
    settled_by: Sequence[str] = ()
    otherwise: str = ""


_WORDS = {verdict: Words(word, TONES.get(verdict, "soft")) for verdict, word in WORDS.items()}
CLAIMS = [Claim(**row) for row in json.loads(Path(__file__).with_name("claims.json").read_text())]
_SHOWN = ("scope", "machine", "sizes")  # of the run's identity, above its other parts or in the scope
_FIGURES = ("stage", "figure", "measured", "predicted", "published", "limit")
_CLAIMED = ("what", "not proved without a GPU", "now", "found")


def settled(claim: Claim, results: Mapping[str, StageResult]) -> tuple[Verdict, str]:
    """Return PASS if all stages of the claim passed, else the verdict on the first worst one, and the reason."""
    found = [result for result in results.values() if result.proves in claim.settled_by]
    for verdict in (*REFUSED, Verdict.NOT_RUN, *DONE[1:]):
        for result in found:
            if result.verdict is verdict:
                return verdict, result.found
    if not claim.settled_by or set(claim.settled_by) - {result.proves for result in found}:
        return Verdict.NOT_RUN, claim.otherwise or "not in this run: accept --full"
    return Verdict.PASS, "; ".join(dict.fromkeys(result.found for result in found))


def page(run: AcceptResult) -> Page:
    """Return the page: the verdict with its scope and reasons, stages with their figures, and a row for each claim."""
    stage_rows, figures, claims, left = (list[list[str | Words]]() for _ in range(4))
    scope = " on ".join(run.identity[key] for key in ("scope", "machine") if key in run.identity)
    words = [Words(", ".join(filter(None, (scope, run.started))))]
    for name, result in run.stages.items():
        stage_rows.append([name, _WORDS[result.verdict], f"{result.seconds:.0f}", Words(result.found, literal=True)])
        for figure in result.figures:
            values = (figure.value, figure.predicted, figure.published, figure.limit)
            measured, *others = ("" if value is None else f"{value:.4g} {figure.unit}" for value in values)
            figures.append([name, figure.name, Words(measured, "worse" if figure.slow else ""), *others])
    for verdict in (*REFUSED, *DONE[1:]):
        for name in run.names(verdict):
            first = run.stages[name].found.partition("\n")[0]
            if first not in run.headline:
                words.append(Words(f"{name}: {WORDS[verdict]}: {first}", _WORDS[verdict].tone))
    for claim in CLAIMS:
        verdict, found = settled(claim, run.stages)
        row: list[str | Words] = [claim.what.replace("`", ""), claim.left_open.replace("`", ""), _WORDS[verdict], found]
        (left if verdict is Verdict.NOT_RUN else claims).append(row)
    sections = [
        Section("Figures", "Beyond its limit a figure is slow.", tables=[Table(_FIGURES, figures)]),
        Section("Stages", tables=[Table(("stage", "verdict", "s", "found"), stage_rows)]),
        Section("What this run settles", tables=[Table(_CLAIMED, claims)]),
        Section(f"What this run leaves open: {len(left)} claims", tables=[Table(_CLAIMED, left)], closed=True),
    ]
    about = ", ".join(f"{name} {value}" for name, value in run.identity.items() if name not in _SHOWN)
    tone: Tone = "worse" if run.refused else "better" if run.accepted and not run.names(*DONE[1:]) else ""
    return Page(run.headline, words, about, _chart(run), sections=sections, tone=tone)


def _chart(run: AcceptResult) -> Picture | None:
    """Draw TPOT beside prediction and published value; before any is measured, the time of each stage."""
    bars, times = [], []
    for name, result in run.stages.items():
        times.append(Bar(name, WORDS[result.verdict], False, Interval(result.seconds, None, None)))
        for figure in (figure for figure in result.figures if figure.name == METRICS["tpot_median_ms"].title):
            values = {"measured": figure.value, "predicted": figure.predicted, "published": figure.published}
            known = {side: Interval(value, None, None) for side, value in values.items() if value is not None}
            bars += [Bar(name, side, side == "published", value) for side, value in known.items()]
    return chart("TPOT median (ms)", bars) or chart(
        "time of each stage (s)", [time for time in times if time.value.value]
    )


def write_bundle(folder: Path) -> Path:
    return Path(shutil.make_archive(str(folder), "gztar", folder.parent, folder.name))

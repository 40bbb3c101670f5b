"""Claims of docs/verified.md that a run on GPUs can settle (`claims.json`), and the page and bundle of a run."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..base.verdict import Verdict
from ..report.evaluation import TONES
from ..report.page import Page, Section, Table, Words
from .journal import Journal, Stage, StageResult


@dataclass(frozen=True)
class Claim:
    """The part of a claim that is not proved without a GPU, and the stages that settle it.

    settled_by: values of `Stage.proves`. otherwise: why no stage settles it.
    """

    what: str
    left_open: str
    settled_by: Sequence[str] = ()
    otherwise: str = ""


_WORDS = {None: "not run", Verdict.PASS: "passed", Verdict.FAIL: "failed"}
CLAIMS = [Claim(**row) for row in json.loads(Path(__file__).with_name("claims.json").read_text())]
_CLAIMED = ("what", "not proved without a GPU", "now", "found")


def settled(claim: Claim, stages: Sequence[Stage], results: Mapping[str, StageResult]) -> tuple[Verdict | None, str]:
    """Return PASS if all stages of the claim passed, FAIL if one failed, None if one did not run, and the reason."""
    proofs = [stage for stage in stages if stage.proves in claim.settled_by]
    found = [results.get(stage.name, StageResult(stage.name, None, "not reached")) for stage in proofs]
    for verdict in (Verdict.FAIL, None):
        for result in found:
            if result.verdict is verdict:
                return verdict, result.found
    if not claim.settled_by or set(claim.settled_by) - {stage.proves for stage in proofs}:
        return None, claim.otherwise or "not in this run: accept --full"
    return Verdict.PASS, "; ".join(dict.fromkeys(result.found for result in found))


def page(stages: Sequence[Stage], journal: Journal) -> Page:
    """Return the page: the verdict, the stages with their figures, and a row for each claim."""
    stage_rows, figures, claims, words = list[list[str | Words]](), list[list[str]](), list[list[str | Words]](), []
    for name, result in journal.results.items():
        stage_rows.append([name, shown(result.verdict), f"{result.seconds:.0f}", Words(result.found, literal=True)])
        for figure in result.figures:
            values = (figure.value, figure.predicted, figure.published)
            cells = ("" if value is None else f"{value:.4g} {figure.unit}" for value in values)
            figures.append([name, figure.name, *cells])
        if result.verdict is Verdict.FAIL:
            words.append(Words(f"{name}: {result.found.splitlines()[0]}", "worse"))
    for claim in CLAIMS:
        verdict, found = settled(claim, stages, journal.results)
        claims.append([claim.what.replace("`", ""), claim.left_open.replace("`", ""), shown(verdict), found])
    sections = [
        Section("Figures", tables=[Table(("stage", "figure", "measured", "predicted", "published"), figures)]),
        Section("Stages", tables=[Table(("stage", "verdict", "s", "found"), stage_rows)]),
        Section("What this run settles", tables=[Table(_CLAIMED, claims)]),
    ]
    about = ", ".join(f"{name} {value}" for name, value in journal.identity.items())
    return Page(journal.headline(stages), words or [Words("No stage failed.", "better")], about, sections=sections)


def shown(verdict: Verdict | None) -> Words:
    return Words(_WORDS[verdict], TONES.get(verdict, "soft"))


def write_bundle(folder: Path) -> Path:
    """Pack `folder` into an archive beside it and return its path."""
    path = folder.with_name(f"{folder.name}.tar.gz")
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, arcname=folder.name)
    return path

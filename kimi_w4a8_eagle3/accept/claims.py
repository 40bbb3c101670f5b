"""Claims of `claims.json`, which docs/verified.md shows too, with the page and the bundle of a run."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter

from ..base.verdict import Verdict
from ..report.evaluation import TONES
from ..report.page import Page, Section, Table, Words
from .journal import Journal, Stage, StageResult


class Claim(BaseModel):
    """One row: what is proved without a GPU, the part that is left open, and the stages that settle it.

    settled_by: values of `Stage.proves`. otherwise: why no stage settles it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    what: str
    shown_by: str
    left_open: str = ""
    settled_by: tuple[str, ...] = ()
    otherwise: str = ""


_WORDS = {None: "not run", Verdict.PASS: "passed", Verdict.FAIL: "failed"}
CLAIMS = TypeAdapter(list[Claim]).validate_json(Path(__file__).with_name("claims.json").read_bytes())


@dataclass(frozen=True)
class SettledClaim:
    """Open part of a claim: PASS if all its stages passed, FAIL if one failed, None if one did not run."""

    claim: Claim
    verdict: Verdict | None
    found: str


def settled(stages: Sequence[Stage], results: Mapping[str, StageResult]) -> list[SettledClaim]:
    return [_settled(claim, stages, results) for claim in CLAIMS if claim.left_open]


def _settled(claim: Claim, stages: Sequence[Stage], results: Mapping[str, StageResult]) -> SettledClaim:
    late = StageResult(found="not reached")
    found = [(stage.proves, results.get(stage.name, late)) for stage in stages if stage.proves in claim.settled_by]
    for verdict in (Verdict.FAIL, None):
        for _, result in found:
            if result.verdict is verdict:
                return SettledClaim(claim, verdict, result.found)
    if not claim.settled_by or set(claim.settled_by) - {proves for proves, _ in found}:
        return SettledClaim(claim, None, claim.otherwise or "not in this run: accept --full")
    return SettledClaim(claim, Verdict.PASS, "; ".join(dict.fromkeys(result.found for _, result in found)))


def page(stages: Sequence[Stage], journal: Journal) -> Page:
    """Return the page: the verdict, the stages with their figures, and a row for each claim."""
    stage_rows: list[list[str | Words]] = []
    figures: list[list[str]] = []
    for name, result in journal.results.items():
        stage_rows.append([name, shown(result.verdict), f"{result.seconds:.0f}", Words(result.found, literal=True)])
        for one in result.figures:
            values = (one.value, one.predicted, one.published)
            figures.append([name, one.name, *("" if value is None else f"{value:.4g} {one.unit}" for value in values)])
    claims: list[list[str | Words]] = []
    for row in settled(stages, journal.results):
        claims.append([row.claim.what.replace("`", ""), row.claim.left_open.replace("`", "")])
        claims[-1] += [shown(row.verdict), row.found]
    failed = [(name, result.found) for name, result in journal.results.items() if result.verdict is Verdict.FAIL]
    words = [Words(f"{name}: {found.splitlines()[0]}", "worse") for name, found in failed]
    sections = [
        Section("Figures", tables=[Table(("stage", "figure", "measured", "predicted", "published"), figures)]),
        Section("Stages", tables=[Table(("stage", "verdict", "s", "found"), stage_rows)]),
        Section("What this run settles", tables=[Table(("what", "not proved without a GPU", "now", "found"), claims)]),
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

"""Claims of `claims.json`, which docs/verified.md shows too, with the page and the bundle of a run."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter

from ..base.files import write_atomic
from ..base.verdict import Verdict
from ..eval.section import STYLE
from .journal import Journal, Stage, StageResult

PAGE = "report.html"


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


CLAIMS = TypeAdapter(list[Claim]).validate_json(Path(__file__).with_name("claims.json").read_bytes())


@dataclass(frozen=True)
class SettledClaim:
    """Open part of a claim: PASS if all its stages passed, FAIL if one failed, None if one did not run."""

    claim: Claim
    verdict: Verdict | None
    found: str


def settled(stages: Sequence[Stage], results: Mapping[str, StageResult]) -> list[SettledClaim]:
    """Return every open claim in the table's order."""
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


def write_page(stages: Sequence[Stage], journal: Journal, folder: Path) -> Path:
    """Write the page: the verdict, the stages, and a row for each claim. Return its path."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # optional: jinja2

    environment = Environment(
        loader=PackageLoader("kimi_w4a8_eagle3.accept", "."), autoescape=True, undefined=StrictUndefined
    )
    text = environment.get_template("claims.html.jinja").render(
        style=STYLE,
        claims=settled(stages, journal.results),
        results=journal.results,
        identity=journal.identity,
        headline=journal.headline(stages),
    )
    write_atomic(folder / PAGE, text)
    return folder / PAGE


def write_bundle(folder: Path) -> Path:
    """Pack `folder` into an archive beside it and return its path."""
    path = folder.with_name(f"{folder.name}.tar.gz")
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, arcname=folder.name)
    return path

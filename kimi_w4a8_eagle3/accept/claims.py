"""Claims from the "not proved" column of docs/verified.md, the stages that settle them, the page and the bundle."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..base.files import write_atomic
from ..eval.section import STYLE
from .journal import Figure, Journal, Outcome, Stage

PAGE = "report.html"


@dataclass(frozen=True)
class Claim:
    """One claim: its name in docs/verified.md, its open part, and the stages that settle it (`Stage.proves`).

    otherwise: why no stage settles it.
    """

    what: str
    left_open: str
    settled_by: tuple[str, ...] = ()
    otherwise: str = ""


CLAIMS = (
    Claim("W4A8 checkpoint through SGLang", "speed, ROCm", ("start", "speed", "lossless")),
    Claim("FlyDSL kernels for gfx942", "time, launch and graph capture on hardware", ("flydsl",)),
    Claim("Triton kernels", "time", ("triton",)),
    Claim("page-offset guard", "the kernel's overflow itself", (), "the guard keeps every pool below it"),
    Claim("recipes", "a start on 8 GPUs", ("start",)),
    Claim("adaptive draft steps, MI300X", "any GPU", (), "serves fixed steps on MI325X"),
    Claim("pictures, MLA drafts, FP8 KV", "the real tower and draft, any GPU", (), "serves text with the MHA draft"),
    Claim("`kimi-w4a8 doctor`, `kimi-w4a8 fetch`", "a real MI325X, the real Hub", ("doctor", "fetch")),
    Claim("`kimi-w4a8 bench`, `kimi-w4a8 report`", "con2 and con40 on 8 GPUs", ("speed",)),
    Claim("`kimi-w4a8 eval`", "GSM8K on Kimi-K2.5", ("gsm8k",)),
    Claim("`kimi-w4a8 quantize`, FP8 draft", "`--device cuda`, full size", (), "needs the BF16 checkpoint, and hours"),
    Claim("MI355X recipes (vLLM)", "everything else", (), "needs eight MI355X"),
    Claim("patches", "their effect on a GPU", (), "needs the unpatched kernels beside them"),
    Claim("replicas behind SGLang's router", "several nodes", (), "needs a second node"),
    Claim("a request that raises inside the engine", "the overlap schedule of GPUs", (), "plants no fault here"),
    Claim("probes, metrics, alerts, dashboard", "a running Grafana", (), "needs Grafana"),
    Claim("Kubernetes manifests", "never applied", (), "needs a cluster"),
    Claim("Slurm script", "several machines, containers", (), "needs a cluster"),
    Claim("image", "the image on its ROCm base", ("image", "start")),
)


@dataclass(frozen=True)
class Row:
    """Claim with its verdict: proved if every stage that settles it passed, failed if one failed."""

    claim: Claim
    verdict: Literal["proved", "failed", "not run"]
    found: str
    figures: list[Figure]


def rows(stages: Sequence[Stage], outcomes: Mapping[str, Outcome]) -> list[Row]:
    """Return one row for each claim, in the page's order."""
    return [_row(claim, stages, outcomes) for claim in CLAIMS]


def _row(claim: Claim, stages: Sequence[Stage], outcomes: Mapping[str, Outcome]) -> Row:
    late = Outcome(state="not run", found="not reached")
    found = [(stage.proves, outcomes.get(stage.name, late)) for stage in stages if stage.proves in claim.settled_by]
    figures = [figure for _, outcome in found for figure in outcome.figures]
    for state in ("failed", "not run"):
        for _, outcome in found:
            if outcome.state == state:
                return Row(claim, state, outcome.found, figures)
    if not claim.settled_by or set(claim.settled_by) - {proves for proves, _ in found}:
        return Row(claim, "not run", claim.otherwise or "no stage of these recipes", figures)
    return Row(claim, "proved", "; ".join(dict.fromkeys(outcome.found for _, outcome in found)), figures)


def write_page(stages: Sequence[Stage], journal: Journal, folder: Path) -> Path:
    """Write the page with a row for each claim and every stage, and return its path."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # optional: jinja2

    environment = Environment(
        loader=PackageLoader("kimi_w4a8_eagle3.accept", "."), autoescape=True, undefined=StrictUndefined
    )
    text = environment.get_template("claims.html.jinja").render(
        style=STYLE, rows=rows(stages, journal.outcomes), outcomes=journal.outcomes, identity=journal.identity
    )
    write_atomic(folder / PAGE, text)
    return folder / PAGE


def write_bundle(folder: Path) -> Path:
    """Pack `folder` into an archive beside it and return its path."""
    path = folder.with_name(f"{folder.name}.tar.gz")
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, arcname=folder.name)
    return path

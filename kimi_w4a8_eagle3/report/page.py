"""`kimi-w4a8 report`: one self-contained HTML page from run directories, with its figures as SVG files."""

from __future__ import annotations

import base64
import io
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..base.errors import KimiError
from ..base.extras import require
from ..base.files import write_atomic
from ..bench import published
from ..bench.measure import Measurement
from ..bench.runs import Run
from ..bench.statistics import METRICS
from .analysis import Analysis
from .speedup import Speedup
from .tables import interval, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PACKAGES = ("jinja2", "matplotlib")  # of the extra `bench`
_TEMPLATE = "page.html.jinja"
_HEADLINE = ("tpot_median_ms", "output_throughput_tok_s")  # shown first


@dataclass(frozen=True)
class Picture:
    """One figure of the page. alt: description in words. source: data URL of the image."""

    alt: str
    source: str


@dataclass(frozen=True)
class Section:
    """Figures under one heading. legend: label and colour. aside: collapsed, not measured here."""

    title: str
    text: str
    pictures: list[Picture]
    legend: list[tuple[str, str]] = field(default_factory=list)
    aside: bool = False


def write_report(analysis: Analysis, folder: Path) -> Path:
    """Write `report.html` and SVGs into `folder` and return the page. Raises KimiError if there is nothing to show."""
    if not analysis.groups:
        raise KimiError(
            "none of the runs has a usable measurement",
            where=", ".join(str(run.folder) for run in analysis.runs),
            remedy="read the problem in each result.json and measure again",
        )
    require(*PACKAGES)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sections = list(_sections(analysis, folder))
        page = folder / "report.html"
        write_atomic(page, _render(analysis, sections))
    except OSError as error:
        raise KimiError(
            f"cannot write the report: {error.strerror}", where=str(folder), remedy="choose a folder with --output"
        ) from error
    return page


def _sections(analysis: Analysis, folder: Path) -> Iterator[Section]:
    """Yield the page's sections in order and save each figure as a file."""
    from . import plots  # optional: matplotlib

    def panels(name: str, title: str, text: str, bars: plots.Bars, aside: bool = False) -> Section:
        shown = [_save(folder, f"{name}-{key}", alt, figure) for key, alt, figure in plots.panels(bars)]
        sides = plots.ordered_sides(bars)
        return Section(title, text, shown, [(side, plots.colour(side, sides)) for side in sides], aside)

    def one(name: str, title: str, text: str, alt: str, figure: Figure) -> Section:
        return Section(title, text, [_save(folder, name, alt, figure)])

    reproduced = plots.measured_bars(analysis.groups, reproducing=True)
    others = plots.measured_bars(analysis.groups, reproducing=False)
    text = (
        "Dots are measurements. A verify step costs the same for any text, so the curve shows what other text would "
        "give; 'even at' is the accept length below which speculation costs time. Grey lines: published accept lengths."
    )
    marks = {text.mark: text.accept_length for text in published.accept_lengths() if text.mark}
    alt = "; ".join(
        f"{curve.title}: {curve.measured:.2f}x at accept length {curve.accept_length:.2f}"
        for curve in analysis.speedups
    )
    figure = plots.speedup_curves(analysis.speedups, marks)
    yield one("speedup", "Speed-up and accept length", text, alt, figure)
    if others:
        text = f"On {_machine(analysis.runs[0])}. These workloads are not published points. Thin lines: 95% intervals."
        yield panels("measured", "Measured here", text, others)
    bars = plots.published_bars()
    for key, more in reproduced.items():
        bars.setdefault(key, []).extend(more)
    heading = "Published and measured" if reproduced else "Published, for reference"
    article = published.load(published.MAIN)
    text = f"Kimi-K2.5 W4A8 on 8x MI325X: {article['source']}; {article['workload']}. Hatched, or a ring: published."
    yield panels("published", heading, text, bars, aside=not reproduced)


def _machine(run: Run) -> str:
    gpus = run.record.get("hardware", {}).get("gpus") or []
    return f"{len(gpus)}x {gpus[0]}" if gpus else f"{run.record['machine']['processor']}, no GPU"


def _save(folder: Path, name: str, alt: str, figure: Figure) -> Picture:
    import matplotlib.pyplot as plt  # optional: matplotlib

    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    plt.close(figure)
    write_atomic(folder / f"{name}.svg", buffer.getvalue())
    image = base64.b64encode(buffer.getvalue()).decode()
    return Picture(alt, f"data:image/svg+xml;base64,{image}")


def _render(analysis: Analysis, sections: Sequence[Section]) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # optional: jinja2

    environment = Environment(
        loader=PackageLoader("kimi_w4a8_eagle3.report", "."), autoescape=True, undefined=StrictUndefined
    )
    environment.filters |= {"number": number, "interval": interval, "shell": shlex.join}
    return environment.get_template(_TEMPLATE).render(
        analysis=analysis,
        sections=sections,
        metrics=METRICS,
        acceptance=_acceptance(analysis),
        references=published.accept_lengths(),
        warnings=_warnings(analysis.runs),
        headline=[row for row in analysis.changes if row.metric.key in _HEADLINE],
    )


def _acceptance(analysis: Analysis) -> list[tuple[Measurement, Speedup | None]]:
    """Return one measurement of every speculating side, with its speed-up; one with examined text if there is any."""
    rows = []
    for (workload, concurrency), sides in analysis.groups.items():
        for side, cell in sides.items():
            examined = next((found for found in cell.measurements if found.text is not None), cell.measurements[0])
            if examined.acceptance is not None:
                rows.append((examined, analysis.measured_speedups.get((workload, concurrency, side))))
    return rows


def _warnings(runs: Sequence[Run]) -> list[str]:
    found = [f"{run.name} is incomplete: {run.result.reason or run.result.status}" for run in runs if _unfinished(run)]
    for measurement in (found for run in runs for found in run.usable):
        found += _remarks(measurement)
    return list(dict.fromkeys(found))


def _unfinished(run: Run) -> bool:
    return run.result.status != "complete"


def _remarks(measurement: Measurement) -> list[str]:
    lines = [f"{measurement.workload.name}: {note}" for note in measurement.notes]
    if measurement.text is not None and measurement.text.warning:
        lines.append(f"{measurement.workload.name}: {measurement.text.warning}")
    return lines

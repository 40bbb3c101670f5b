"""`kimi report`: run directories become one HTML page without any outside file, and the same figures as PNG."""

from __future__ import annotations

import base64
import io
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bench import long_input, predict, published, speedup
from ..bench.compare import Row, compare_sides
from ..bench.machine_model import Cluster
from ..bench.measure import Measurement
from ..bench.runs import Run, grouped, repetitions
from ..bench.statistics import METRICS, estimate
from ..bench.tables import interval, number
from ..errors import KimiError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TEMPLATE = "page.html.jinja"
_DPI = 160
# Texts shown on the speed-up plot: few enough to read.
_MARKED = {"MTBench": "MTBench", "GSM8K": "GSM8K", "random 10240/512 at con40": "random (repeated)"}


@dataclass(frozen=True)
class Picture:
    """One figure of the page. source: a data URL with the image itself."""

    name: str
    title: str
    text: str
    source: str


def write_report(runs: Sequence[Run], folder: Path) -> Path:
    """Write `report.html` and PNGs into `folder`; returns the page. Raises KimiError when there is nothing to show."""
    if not any(run.usable for run in runs):
        raise KimiError(
            "none of the runs has a usable measurement",
            where=", ".join(str(run.folder) for run in runs),
            remedy="each result.json names the problem; measure again",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pictures = [_save(folder, *each) for each in _figures(runs)]
        page = folder / "report.html"
        temporary = page.with_suffix(".tmp")
        temporary.write_text(_render(runs, pictures), encoding="utf-8")
        temporary.replace(page)
    except OSError as error:
        raise KimiError(
            f"the report cannot be written: {error.strerror}", where=str(folder), remedy="choose a folder with --out"
        ) from error
    return page


def _figures(runs: Sequence[Run]) -> list[tuple[str, str, str, Figure]]:
    """(file name, title, text, figure), in the order of the page."""
    from . import plots
    from .model_plot import model_plot

    found: list[tuple[str, str, str, Figure]] = []
    reproduced = plots.measured_bars(runs, reproducing=True)
    others = plots.measured_bars(runs, reproducing=False)
    if others:
        text = "Workloads that are not published points. Thin lines: 95% intervals."
        found.append(("measured", "Measured here", text, plots.six_panels(others, f"Measured on {_machine(runs[0])}")))
    bars = plots.published_bars()
    for key, more in reproduced.items():
        bars.setdefault(key, []).extend(more)
    heading = "Published and measured" if reproduced else "Published, for reference"
    text = f"{published.load('mi325x-eagle3')['source']}; {published.load('mi325x-eagle3')['workload']}."
    found.append(("published", heading, text, plots.six_panels(bars, f"{heading}: Kimi-K2.5 W4A8, 8x MI325X")))
    curves = [*speedup.from_runs(runs), *speedup.from_published()]
    text = (
        "Dots were measured. A verify step costs the same whatever the text, so the curve tells what other text would "
        "give; 'even at' is the accept length below which speculation costs time. Grey lines: published accept lengths."
    )
    marks = {
        _MARKED[row["text"]]: row["accept_length"]
        for kind in ("real", "repeated")
        for row in published.load("acceptance")[kind]
        if row["text"] in _MARKED
    }
    found.append(("speedup", "Speed-up and accept length", text, plots.speedup_curves(curves, marks)))
    if lengths := long_input.from_runs(runs):
        text = (
            "Time of one output token without the waiting for other requests' prefill. A verify step is divided by the "
            "server's forward-pass times, which need ENABLE_METRICS_DEVICE_TIMER=1 and a GPU; elsewhere it is one bar. "
            "Published (MI355X): verification of an accepted token takes 0.30 ms at 1K and 2.56 ms at 8K input."
        )
        found.append(("long-input", "Long inputs", text, plots.long_inputs(lengths)))
    points = predict.check(predict.calibrate(Cluster()), Cluster())
    text = (
        "Time of a step counted from the model's shapes and the GPU's peaks, with three fitted numbers: time a layer, "
        "and the shares of the peaks that decode and prefill reach. See kimi bench predict."
    )
    found.append(("model", "What the machine should do", text, model_plot(points)))
    examined = [each for run in runs for each in run.usable if each.accepted_histogram]
    text = "How many draft tokens a verify step accepted, from a few requests repeated one at a time after the load."
    figure = plots.acceptance_histogram(plots.histogram_rows(examined))
    found.append(("acceptance", "Accepted draft tokens", text, figure))
    return found


def _machine(run: Run) -> str:
    gpus = run.record.get("hardware", {}).get("gpus") or []
    return f"{len(gpus)}x {gpus[0]}" if gpus else f"{run.record['machine']['processor']}, no GPU"


def _save(folder: Path, name: str, title: str, text: str, figure: Figure) -> Picture:
    import matplotlib.pyplot as plt

    figure.savefig(folder / f"{name}.png", dpi=_DPI)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    plt.close(figure)
    image = base64.b64encode(buffer.getvalue()).decode()
    return Picture(name, title, text, f"data:image/png;base64,{image}")


def _render(runs: Sequence[Run], pictures: Sequence[Picture]) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("kimi_w4a8_eagle3.report", "."), autoescape=True, undefined=StrictUndefined
    )
    environment.filters |= {"number": number, "interval": interval, "shell": shlex.join}
    return environment.get_template(_TEMPLATE).render(
        runs=runs,
        pictures=pictures,
        metrics=METRICS,
        tables=_tables(runs),
        comparisons=published.compare(runs),
        changes=compare_sides(runs),
        acceptance=_acceptance(runs),
        references=published.load("acceptance"),
        curves=[*speedup.from_runs(runs), *speedup.from_published()],
        refused=[(run, each, reason) for run in runs for each, reason in run.refused],
        warnings=_warnings(runs),
        headline=_headline(runs),
    )


def _tables(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One table for each workload and concurrency: figures down, sides across."""
    tables = []
    for (workload, concurrency), sides in grouped(runs).items():
        estimates = {
            side: {key: estimate(repetitions(pairs), metric) for key, metric in METRICS.items()}
            for side, pairs in sides.items()
        }
        counts = {side: len(pairs) for side, pairs in sides.items()}
        summary = next(iter(sides.values()))[0][1].workload.summary
        tables.append(
            {
                "workload": workload,
                "concurrency": concurrency,
                "summary": summary,
                "sides": estimates,
                "repetitions": counts,
            }
        )
    return tables


def _acceptance(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Accept length beside the speed-up it came with, for every speculating side."""
    gains = {curve.title: curve.measured for curve in speedup.from_runs(runs)}
    rows = []
    for (workload, concurrency), sides in grouped(runs).items():
        for side, pairs in sides.items():
            examined = next((each for _, each in pairs if each.text is not None), pairs[0][1])
            if examined.acceptance is None:
                continue
            start = f"{workload}, concurrency {concurrency}: {side} over "
            rows.append(
                {
                    "workload": workload,
                    "concurrency": concurrency,
                    "side": side,
                    "found": examined,
                    "gain": next((gain for title, gain in gains.items() if title.startswith(start)), None),
                }
            )
    return rows


def _warnings(runs: Sequence[Run]) -> list[str]:
    found = [f"{run.name} is incomplete: {run.result.reason or run.result.status}" for run in runs if _unfinished(run)]
    for each in (each for run in runs for each in run.usable):
        found += _remarks(each)
    return list(dict.fromkeys(found))


def _unfinished(run: Run) -> bool:
    return run.result.status != "complete"


def _remarks(each: Measurement) -> list[str]:
    lines = [f"{each.workload.name}: {note}" for note in each.notes]
    if each.text is not None and each.text.warning:
        lines.append(f"{each.workload.name}: {each.text.warning}")
    return lines


def _headline(runs: Sequence[Run]) -> list[Row]:
    """The rows that a reader wants first: TPOT and throughput, B over A."""
    wanted = ("tpot_median_ms", "output_throughput_tok_s")
    return [row for row in compare_sides(runs) if row.metric.key in wanted]

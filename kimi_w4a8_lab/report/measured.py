"""Content of a benchmark's page: verdict, measured beside published and predicted figures, acceptance, environment."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Sequence
from importlib.util import find_spec

import numpy as np

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.installed import not_installed

from ..base.other_programs import busy
from ..predict.predict import of_workload
from ..speed import published
from ..speed.runs import Cell, Run
from ..speed.statistics import METRICS, Interval, Metric
from . import shapes
from .analysis import Analysis, CellKey
from .changes import Direction, Row
from .page import Page, Picture, Section, Table, Tone, Words

_HEADLINE = ("tpot_median_ms", "output_throughput_tok_s", "ttft_median_ms")
_TONES: dict[Direction, Tone] = {Direction.BETTER: "better", Direction.WORSE: "worse"}


def page(analysis: Analysis, charts: bool = True, figures: Collection[str] = _HEADLINE) -> Page:
    """Return the page of finished runs. Raises KimiError if there is nothing to show.

    figures: the metrics that a terminal shows.
    """
    if not analysis.groups:
        raise KimiError(
            "none of the runs has a usable measurement",
            where=", ".join(str(run.folder) for run in analysis.runs),
            remedy="read the problem in each result.json and measure again",
        )
    by_shape = shapes.shapes(analysis)
    pictures, remarks = list[Picture](), notes(analysis)
    if charts and find_spec("matplotlib"):
        pictures = _pictures(analysis, by_shape)
    elif charts:
        remarks.append(f"No charts: {(missing := not_installed(['matplotlib'])).what}. {missing.remedy}")
    first, *verdict = verdicts(analysis)
    models = dict.fromkeys(found.model for run in analysis.runs for found in run.usable if found.model)
    about = f"Benchmark of {' and '.join(models) or 'a model that was not recorded'}. On " + "; ".join(
        f"{_machine(run)}: {run.name} ({run.record['started']})" for run in analysis.runs
    )
    sections = [
        Section("Measured, published, predicted", _INTERVALS, tables=figure_tables(analysis, _HEADLINE)),
        Section("Shapes", _SHAPES, tables=[shapes.table(by_shape)]),
        Section("Other figures", pictures=pictures[1:-1]),
        Section("Acceptance", _ACCEPTANCE, pictures[-1:], [acceptance(analysis)]),
        Section("Published accept lengths", _CURVES, tables=[_references(analysis)], closed=True),
        Section("Conversations by turn", tables=turn_tables(analysis)),
        Section("All figures", _INTERVALS, tables=figure_tables(analysis, METRICS), closed=True),
        *(_environment(run) for run in analysis.runs),
    ]
    lead = pictures[0] if pictures else None
    return Page(first.text, verdict, about, lead, remarks, sections, first.tone, list(_lines(analysis, figures)))


def _pictures(analysis: Analysis, by_shape: Sequence[shapes.Shape]) -> list[Picture]:
    """Return the charts, the leading one first and the speed-up over accept length last."""
    from . import plots  # optional: matplotlib

    several = [plots.speedup_by_shape(by_shape)] if len(by_shape) > 1 else []
    by_turn = plots.ttft_by_turn(list(analysis.cells.values()))
    pictures = [*several, *([by_turn] if by_turn else []), *plots.panels(plots.bars(analysis.groups))]
    return [*pictures, plots.speedup_curves(analysis.speedups)]


def verdicts(analysis: Analysis) -> list[Words]:
    """Return a sentence for each side's shapes, each comparison of two sides, and each cell compared with none."""
    rows = [row for row in analysis.changes if row.metric.key == _HEADLINE[0]]
    compared = {(row.workload, row.concurrency, side) for row in rows for side in (row.a, row.b)}
    alone = [_alone(analysis, key, cell) for key, cell in analysis.cells.items() if key not in compared]
    return [*shapes.sentences(shapes.shapes(analysis)), *(_side_by_side(analysis, row) for row in rows), *alone]


def _side_by_side(analysis: Analysis, row: Row) -> Words:
    where = f"on {row.workload} at concurrency {row.concurrency}"
    pair = "EAGLE3" if row.a == f"{row.b}:plain" else f"{row.b} against {row.a}"
    length = analysis.cells[row.workload, row.concurrency, row.b].accept_length
    tokens = "" if length is None else f", {length:.2f} tokens per verify step"
    said = f"{pair} is {factor(row.speedup)} as fast {where}"
    if row.direction not in _TONES:
        said = f"{pair}: {row.direction.value} {where}"
    return Words(f"{said} (TPOT {_from_to(row)}{tokens}).", _TONES.get(row.direction, ""))


def _from_to(row: Row) -> str:
    """Return both figures of a row; the unit stands once."""
    first, second = (number(found.value, row.metric) for found in (row.value_a, row.value_b))
    return f"{first.removesuffix(row.metric.unit)}to {second}"


def _lines(analysis: Analysis, keys: Collection[str]) -> Iterator[Words]:
    """Yield a line for each of these figures: of two sides that were compared, or of one alone."""
    rows = [row for row in analysis.changes if row.metric.key in keys]
    compared = {(row.workload, row.concurrency, side) for row in rows for side in (row.a, row.b)}
    for row in rows:
        said = f"{factor(row.speedup)} as good" if row.direction in _TONES else row.direction.value
        side = f" {row.b}" if len(compared) > 2 * len({(row.workload, row.concurrency) for row in rows}) else ""
        where = f"{row.workload} c={row.concurrency}{side}: {row.metric.title}"
        yield Words(f"{where} {_from_to(row)}, {said}", _TONES.get(row.direction, ""))
    for key, cell in analysis.cells.items():
        for name in METRICS if key not in compared else ():
            if name in keys:
                reported = analysis.against_published[key].get(name)
                known = "" if reported is None else f", published {number(reported.published, METRICS[name])}"
                where = f"{key[0]} c={key[1]} {key[2]}: {METRICS[name].title}"
                yield Words(f"{where} {interval(cell.figures[name], METRICS[name])}{known}")


def _alone(analysis: Analysis, key: CellKey, cell: Cell) -> Words:
    tpot, rate, _ = (number(cell.figures[name].value, METRICS[name]) for name in _HEADLINE)
    tokens = "" if cell.accept_length is None else f", {cell.accept_length:.2f} tokens per verify step"
    reported = analysis.against_published[key].get(_HEADLINE[0])
    against = "" if reported is None else f" Published TPOT {reported.published:.2f} ms: {reported.meaning}."
    where = f"{cell.side} on {cell.workload.name} at concurrency {cell.concurrency}"
    tokens += _over_turns(cell)
    tone = _TONES.get(reported.direction, "") if reported else ""
    return Words(f"{where}: TPOT {tpot}, {rate}{tokens}.{against}", tone)


def _over_turns(cell: Cell) -> str:
    """Return what a returning conversation waits for, and how much of its prompts the server had; empty for others."""
    measurement = cell.measurements[0]
    if len(turns := measurement.turns) < 2:
        return ""
    later = float(np.median([turn.ttft_median_ms for turn in turns[1:]]))
    cached = "" if measurement.cached is None else f", {measurement.cached:.0%} of the prompt tokens cached"
    return f", TTFT {turns[0].ttft_median_ms:,.0f} ms in the first turn and {later:,.0f} ms later{cached}"


def notes(analysis: Analysis) -> list[str]:
    """Return what a reader must know before using the figures: unfinished runs, refused measurements, remarks."""
    found = []
    for run in analysis.runs:
        if run.result.status != "complete":
            found.append(f"{run.name} is incomplete: {run.result.reason or run.result.status}")
        found += [f"Left out: {bad.workload.name}, {bad.side} in {run.name}: {why}" for bad, why in run.refused]
        if warning := busy(_others(run) or 0.0):
            found.append(warning)
        for measurement in run.usable:
            text = [measurement.text.warning] if measurement.text and measurement.text.warning else []
            found += [f"{measurement.workload.name}: {note}" for note in (*measurement.notes, *text)]
            if compares := measurement.workload.compares:
                found.append(f"{measurement.workload.name}: these figures compare with {compares}.")
    return list(dict.fromkeys(found))


def figure_tables(analysis: Analysis, keys: Collection[str]) -> list[Table]:
    """Return a table for each workload and concurrency: every figure and side, measured, published and predicted."""
    changes = {(row.workload, row.concurrency, row.b, row.metric.key): row for row in analysis.changes}
    tables = []
    for (workload, concurrency), sides in analysis.groups.items():
        rows: list[list[str | Words]] = []
        for key, metric in METRICS.items():
            for side, cell in sides.items() if key in keys else ():
                cells: list[str | Words] = [metric.title, side, interval(cell.figures[key], metric)]
                cells += _beside(analysis, (workload, concurrency, side), key)
                change = changes.get((workload, concurrency, side, key))
                if change:
                    bounds = factor(change.speedup)
                    said = f"{bounds} as good as {change.a}"
                    if change.direction not in _TONES:
                        said = f"{change.direction.value} to {change.a} ({bounds})"
                    cells.append(Words(said, _TONES.get(change.direction, "")))
                rows.append([*cells, ""] if not change else cells)
        for side, cell in sides.items():
            if cell.accept_length is not None:
                reported = published.points().get(cell.workload.reference or "", {}).get(side, {}).get("accept_length")
                known = "" if reported is None else f"{reported:.2f}"
                rows.append(["accept length", side, f"{cell.accept_length:.2f}", "", known, "", ""])
        count = max(len(cell.measurements) for cell in sides.values())
        title = f"{workload}, concurrency {concurrency}, {count} repetition{'s' * (count > 1)}"
        tables.append(Table(_FIGURES, rows, title))
    return tables


def _beside(analysis: Analysis, key: CellKey, metric: str) -> list[str | Words]:
    """Return the cells predicted, published, and its meaning."""
    cell, reported = analysis.cells[key], analysis.against_published[key].get(metric)
    settings = cell.run.record.get("targets", {}).get(cell.side, {}).get("settings", ())
    predicted = of_workload(cell.side, cell.workload, cell.concurrency, cell.accept_length, metric, settings)
    shown = "" if predicted is None else number(predicted, METRICS[metric])
    if reported is None:
        return [shown, "", ""]
    meaning = Words(reported.meaning, _TONES.get(reported.direction, ""))
    return [shown, number(reported.published, METRICS[metric]), meaning]


def turn_tables(analysis: Analysis) -> list[Table]:
    """Return the turns of conversations: TTFT, and the cached part of each prompt."""
    found = []
    for (workload, concurrency, side), cell in analysis.cells.items():
        rows: list[Sequence[str | Words]] = []
        for same in zip(*(measurement.turns for measurement in cell.measurements), strict=True):
            figures = [(one.prompt_tokens, one.cached_tokens, one.ttft_median_ms, one.ttft_p99_ms) for one in same]
            prompt, cached, median, p99 = np.mean(figures, axis=0)
            counts = (f"{prompt:,.0f}", f"{prompt - cached:,.1f}", f"{cached / prompt:.1%}")
            rows.append([str(len(rows) + 1), *counts, f"{median:,.1f} ms", f"{p99:,.1f} ms"])
        if rows:
            found.append(Table(_TURNS, rows, f"{workload}, concurrency {concurrency}, {side}"))
    return found


def acceptance(analysis: Analysis) -> Table:
    """Return one row for each speculating cell, with the repetition of a measurement whose text was examined."""
    rows: list[list[str | Words]] = []
    for key, cell in analysis.cells.items():
        found = next((one for one in cell.measurements if one.text is not None), cell.measurements[0])
        if (accepted := cell.acceptance) is not None:
            speedup, text = analysis.measured_speedups.get(key), found.text
            positions = ", ".join(f"{share:.0%}" for share in accepted.per_position)
            repeats = ["", ""] if text is None else [f"{text.prompt:.0%}", f"{text.output:.0%}"]
            rates = [f"{accepted.length:.2f}", f"{accepted.rate:.1%}", positions]
            what = f"{cell.workload.name}, c={cell.concurrency}, {cell.side}"
            steps, times = f"{accepted.steps:,}", f"{speedup.measured:.2f}x" if speedup else ""
            rows.append([what, *rates, steps, times, *repeats])
    return Table(_ACCEPTED, rows)


def _references(analysis: Analysis) -> Table:
    """Return published accept lengths with the speed-up that each curve gives there."""
    curves, rows = analysis.speedups, []
    for row in published.accept_lengths():
        there = (f"{curve.at(row.accept_length):.2f}x" for curve in curves)
        rows.append([row.text, row.kind, f"{row.accept_length:.2f}", *there, row.source])
    even = (f"{c.break_even:.2f}" if c.break_even <= 4 else "never" for c in curves)
    columns = ["text", "kind", "accept length", *(c.title for c in curves), "source"]
    return Table(columns, [*rows, ["break-even", "", "", *even, ""]])


def _environment(run: Run) -> Section:
    record = run.record
    facts = {
        "machine": f"{_machine(run)}; {record['machine']['platform']}",
        "versions": ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
        "commit": record["git_commit"] or "not a checkout",
        "command": shlex.join(record["command"]),
    }
    listings = []
    for name, launch in record["servers"].items():
        variables = "".join(f"{key}={value}\n" for key, value in launch["env"].items())
        listings.append((f"server {name}", variables + shlex.join(launch["argv"])))
    for found in run.result.measurements:
        where = f"{found.workload.name}, c={found.concurrency}, {found.side}"
        title = f"load: {where}, repetition {found.repetition_index + 1}, seed {found.seed}"
        listings.append((title, shlex.join(found.command)))
    return Section(
        f"Environment of {run.name}", tables=[Table(("", ""), list(facts.items()))], listings=listings, closed=True
    )


def _machine(run: Run) -> str:
    hardware, machine = run.record.get("hardware", {}), run.record["machine"]
    gpus = hardware.get("gpus") or []
    if not hardware.get("known", True):
        return "another machine with unknown GPUs"
    others = "" if (share := _others(run)) is None else f" (other programs used up to {share:.0%})"
    host = f"{machine['processor']}, {machine['cores']} cores{others}, {machine['memory_gib']} GiB"
    return f"{len(gpus)}x {gpus[0]}, {host}" if gpus else f"{host}, no GPU"


def _others(run: Run) -> float | None:
    """Return the largest share of the cores that other programs used; None where it was not watched."""
    return max((found.others for found in run.usable if found.others is not None), default=None)


def number(value: float, metric: Metric) -> str:
    """Format a figure with its unit and at least three significant digits."""
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f} {metric.unit}"


def interval(found: Interval, metric: Metric) -> str:
    """Format a figure with its 95% interval, if it has one."""
    if found.low is None or found.high is None:
        return number(found.value, metric)
    low, high = (number(bound, metric).removesuffix(f" {metric.unit}") for bound in (found.low, found.high))
    return f"{number(found.value, metric)} [{low}, {high}]"


def factor(found: Interval) -> str:
    """Format a ratio as `1.79x`, with its 95% interval if it has one."""
    bounds = "" if found.low is None or found.high is None else f" [{found.low:.2f}, {found.high:.2f}]"
    return f"{found.value:.2f}x{bounds}"


_FIGURES = ("figure", "side", "measured [95%]", "predicted", "published", "meaning", "compared")
_LENGTH = ("side", "accept length", "accept rate", "by position", "verify steps")
_ACCEPTED = (*_LENGTH, "speed-up", "prompt repeats", "output repeats")
_TURNS = ("turn", "prompt, tokens", "computed", "from the prefix cache", "TTFT median", "TTFT P99")
_INTERVALS = "Medians over repetitions. Intervals are 95% bootstrap intervals over requests and repetitions."
_ACCEPTANCE = (
    "Accept length: tokens committed by a verify step, with the target's own. It is a property of the text. A verify "
    "step costs the same for any text, so a curve shows the speed-up on other text. Where it breaks even, speculation "
    "begins to gain time. Dots are measurements, grey lines published accept lengths."
)
_SHAPES = (
    "Speculation shortens only the decoding of a request. 'computed speed-up' follows from the speed-up of "
    "decoding and its share, when prefill takes as long as before."
)
_CURVES = "The speed-ups here are not measured. They follow from each curve's step and stall times."

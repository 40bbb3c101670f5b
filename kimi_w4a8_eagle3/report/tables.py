"""Results as tables on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..base.console import table_console
from ..base.errors import KimiError
from ..bench.measure import Measurement
from ..bench.runs import Cell
from ..bench.statistics import METRICS, Interval, Metric
from ..predict.predict import Choice, Fit, Load, Point, mean_error
from .analysis import Analysis


def print_figures(analysis: Analysis, console: Console | None = None) -> None:
    """Print the figures of runs, the servers' metrics, and the published comparison."""
    console = console or table_console()
    for sides in analysis.groups.values():
        for cell in sides.values():
            console.print(_figures(cell))
            _facts(cell.measurements[0], console)
            if cell.measurements[0].turns:
                console.print(_turns(cell))
    if analysis.against_published:
        table = Table("published", "figure", "published", "measured", "difference", "what it means", title_style="bold")
        for comparison in analysis.against_published:
            table.add_row(
                f"{comparison.workload} {comparison.side}",
                comparison.metric.title,
                number(comparison.published, comparison.metric),
                number(comparison.measured.value, comparison.metric),
                f"{comparison.difference:+.1%}",
                comparison.verdict,
            )
        console.print(table)
    for run in analysis.runs:
        for refused, reason in run.refused:
            console.print(f"[red]left out[/] {refused.workload.name}, {refused.side}: {reason}")
        console.print(f"All files are in {run.folder}; `kimi-w4a8 report {run.folder}` makes a page", markup=False)


def print_comparison(analysis: Analysis) -> None:
    """Print every side against the base, figure by figure, and refused measurements with their reason.

    Raises KimiError if no workload was measured on two sides.
    """
    console = table_console()
    for run in analysis.runs:
        if run.result.status != "complete":
            console.print(f"[yellow]warning:[/] {run.name} is {run.result.status}: {escape(run.result.reason)}")
        for refused, reason in run.refused:
            console.print(f"[red]left out[/] {run.name}: {refused.workload.name}, {refused.side}: {escape(reason)}")
    if not analysis.changes:
        raise KimiError(
            "nothing to compare",
            where=", ".join(str(run.folder) for run in analysis.runs),
            expected="usable measurements of one workload and concurrency on at least two sides",
            remedy="run the same workload on another recipe, or use `kimi-w4a8 bench ab`",
        )
    for key, group in groupby(analysis.changes, key=lambda row: (row.workload, row.concurrency, row.a, row.b)):
        name, concurrency, a, b = key
        title = f"{name}, concurrency {concurrency}: {b} over {a}"
        table = Table("figure", a, b, "ratio [95% interval]", "verdict", title=title, title_style="bold")
        for row in group:
            table.add_row(
                row.metric.title,
                number(row.value_a.value, row.metric),
                number(row.value_b.value, row.metric),
                _ratio(row.change),
                row.verdict,
            )
        console.print(table)


def _ratio(change: Interval) -> str:
    if change.low is None or change.high is None:
        return f"{change.value:.3f}"
    return f"{change.value:.3f} [{change.low:.3f}, {change.high:.3f}]"


def print_model(fit: Fit, points: Sequence[Point]) -> None:
    """Print the fitted unknowns, and every published figure with the model's value."""
    console = table_console()
    table = Table("article", "point", "figure", "published", "model", "error", title="8x MI325X, 10240 in / 512 out")
    for point in points:
        metric = METRICS[point.key]
        error = "calibrated" if point.calibrated else f"{point.error:+.1%}"
        values = (number(point.published, metric), number(point.predicted, metric))
        table.add_row(point.source, f"{point.point} {point.side}", metric.title, *values, error)
    console.print(table)
    console.print(
        f"fitted: {fit.layer_s * 1e6:.0f} us per layer and step, decode at {fit.decode_efficiency:.0%} and prefill at "
        f"{fit.prefill_efficiency:.0%} of the peaks; mean error of the {sum(not p.calibrated for p in points)} other "
        f"points: {mean_error(points):.1%}"
    )


def print_choices(load: Load, found: Sequence[Choice]) -> None:
    """Print the figures by draft steps from 0 up, with the best one marked."""
    console = table_console()
    best = max(found, key=lambda choice: choice.throughput_tok_s)
    title = (
        f"concurrency {load.concurrency}, {load.input_len} in / {load.output_len} out, text with accept length "
        f"{load.accept_length:.2f} at {load.steps} draft steps"
    )
    table = Table("draft steps", "draft tokens", "accept length", "TPOT", "output throughput", "", title=title)
    for choice in found:
        tokens = str(choice.steps + 1) if choice.steps else "no speculation"
        values = (f"{choice.accept_length:.2f}", f"{choice.tpot_ms:.2f} ms", f"{choice.throughput_tok_s:,.0f} tok/s")
        table.add_row(str(choice.steps), tokens, *values, "best" if choice is best else "")
    console.print(table)


def number(value: float, metric: Metric) -> str:
    """Format a figure with its unit and at least three significant digits."""
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2
    return f"{value:,.{digits}f} {metric.unit}"


def interval(found: Interval, metric: Metric) -> str:
    """Format a figure with its 95% interval, if it has one."""
    if found.low is None or found.high is None:
        return number(found.value, metric)
    low, high = (number(bound, metric).removesuffix(f" {metric.unit}") for bound in (found.low, found.high))
    return f"{number(found.value, metric)} [{low}, {high}]"


def _figures(cell: Cell) -> Table:
    title = f"{cell.workload.name}, concurrency {cell.concurrency}, {cell.side}"
    table = Table(title=title, title_style="bold")
    table.add_column("figure")
    table.add_column("measured [95% interval]", justify="right")
    for key, metric in METRICS.items():
        table.add_row(metric.title, interval(cell.figures[key], metric))
    return table


def _turns(cell: Cell) -> Table:
    """Make the table of a conversation's turns: TTFT, and the cached part of each prompt."""
    table = Table("turn", "prompt, tokens", "computed", "from the prefix cache", "TTFT median", "TTFT P99")
    for number, same in enumerate(zip(*(measurement.turns for measurement in cell.measurements), strict=True), start=1):
        prompt, cached, median, p99 = np.mean([list(turn.model_dump().values()) for turn in same], axis=0)
        counts = (f"{prompt:,.0f}", f"{prompt - cached:,.1f}", f"{cached / prompt:.1%}")
        table.add_row(str(number), *counts, f"{median:,.1f} ms", f"{p99:,.1f} ms")
    return table


def _facts(found: Measurement, console: Console) -> None:
    """Print acceptance, server and text, one line each."""
    if found.acceptance is not None:
        accepted = found.acceptance
        detail = ", ".join(f"{share:.0%}" for share in accepted.per_position)
        positions = f"; accepted at draft position 1, 2, ...: {detail} ({found.probes} probes)" if detail else ""
        console.print(
            f"accept length {accepted.length:.3f} over {accepted.steps:,} verify steps, "
            f"accept rate {accepted.rate:.1%}{positions}"
        )
    if (server := found.server) is not None:
        cached = "" if found.cached is None else f"{found.cached:.1%} of the prompts from the prefix cache, "
        steps = "" if server.draft_steps is None else f"; {server.draft_steps:.1f} draft steps"
        console.print(
            f"server: KV use up to {server.kv_usage_peak:.1%}, queue up to {server.queued_peak:.0f}, "
            f"{cached}retracted {server.retracted:.0f}{steps}"
        )
    if found.text is not None and found.text.warning:
        console.print(f"[yellow]warning:[/] {found.text.warning}")
    for note in found.notes:
        console.print(f"[yellow]note:[/] {note}")

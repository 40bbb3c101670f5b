"""Results as tables on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import table as rich_table
from rich.console import Console
from rich.markup import escape

from ..base.console import table_console
from ..base.errors import KimiError
from ..bench.measure import Measurement
from ..bench.statistics import METRICS
from ..predict.predict import Choice, Fit, Load, PredictedPoint, mean_error
from .analysis import Analysis
from .measured import figure_tables, notes, number, turn_tables
from .page import Table, Tone

_STYLES: dict[Tone, str] = {"": "none", "better": "green", "worse": "red", "soft": "dim"}


def print_figures(analysis: Analysis, console: Console | None = None) -> None:
    """Print all figures of the runs beside the published and predicted ones, the servers' metrics, and all notes."""
    console = console or table_console()
    for table in (*figure_tables(analysis, METRICS), *turn_tables(analysis)):
        _print(table, console)
    for cell in analysis.cells.values():
        _facts(f"{cell.workload.name}, {cell.side}: ", cell.measurements[0], console)
    for note in notes(analysis):
        console.print(f"[yellow]note:[/] {escape(note)}")


def require_comparison(analysis: Analysis) -> None:
    """Raise KimiError if no workload was measured on two sides."""
    if not analysis.changes:
        raise KimiError(
            "nothing to compare",
            where=", ".join(str(run.folder) for run in analysis.runs),
            expected="usable measurements of one workload and concurrency on at least two sides",
            remedy="run the same workload on another recipe, or use `kimi-w4a8 bench ab`",
        )


def _print(table: Table, console: Console) -> None:
    table = table.filled()
    shown = rich_table.Table(*table.columns, title=escape(table.title), title_style="bold")
    for row in table.rows:
        cells = (cell for cell in row if not isinstance(cell, str))
        shown.add_row(*(f"[{_STYLES[cell.tone]}]{escape(cell.text)}[/]" for cell in cells))
    console.print(shown)


def print_model(fit: Fit, points: Sequence[PredictedPoint]) -> None:
    """Print the fitted unknowns, and every published figure with the model's value."""
    console = table_console()
    table = rich_table.Table(
        "article", "point", "figure", "published", "model", "error", title="8x MI325X, 10240 in / 512 out"
    )
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
    table = rich_table.Table(
        "draft steps", "draft tokens", "accept length", "TPOT", "output throughput", "", title=title
    )
    for choice in found:
        tokens = str(choice.steps + 1) if choice.steps else "no speculation"
        values = (f"{choice.accept_length:.2f}", f"{choice.tpot_ms:.2f} ms", f"{choice.throughput_tok_s:,.0f} tok/s")
        table.add_row(str(choice.steps), tokens, *values, "best" if choice is best else "")
    console.print(table)


def _facts(head: str, found: Measurement, console: Console) -> None:
    """Print acceptance and server, one line each."""
    if found.acceptance is not None:
        accepted = found.acceptance
        detail = ", ".join(f"{share:.0%}" for share in accepted.per_position)
        positions = f"; accepted at draft position 1, 2, ...: {detail} ({found.probes} probes)" if detail else ""
        console.print(
            f"{head}accept length {accepted.length:.3f} over {accepted.steps:,} verify steps, "
            f"accept rate {accepted.rate:.1%}{positions}"
        )
    if (server := found.server) is not None:
        cached = "" if found.cached is None else f"{found.cached:.1%} of the prompts from the prefix cache, "
        steps = "" if server.draft_steps is None else f"; {server.draft_steps:.1f} draft steps"
        console.print(
            f"{head}KV use up to {server.kv_usage_peak:.1%}, queue up to {server.queued_peak:.0f}, "
            f"{cached}retracted {server.retracted:.0f}{steps}"
        )

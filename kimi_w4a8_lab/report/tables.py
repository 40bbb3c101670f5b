"""Results as tables on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich import table as rich_table
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

from kimi_w4a8_eagle3.base.console import table_console

from ..base.verdict import Verdict
from ..predict.predict import Choice, Fit, Load, PredictedPoint, mean_error
from ..speed.statistics import METRICS
from . import shapes
from .analysis import Analysis
from .measured import acceptance, figure_tables, notes, number, server_load, turn_tables
from .page import Page, Table, Tone

_COLOURS = {Verdict.PASS: "green", Verdict.FAIL: "red", Verdict.INVALID: "red"}
_STYLES: dict[Tone, str] = {"": "none", "better": "green", "worse": "red", "soft": "dim"}


def print_figures(analysis: Analysis, console: Console | None = None) -> None:
    """Print all figures of the runs beside the published and predicted ones, the servers' metrics, and all notes."""
    console = console or table_console()
    by_shape = shapes.table(shapes.shapes(analysis))
    tables = *figure_tables(analysis, METRICS), *turn_tables(analysis), acceptance(analysis), server_load(analysis.runs)
    for table in (table for table in (*tables, by_shape) if table.rows):
        print_table(table, console)
    for note in notes(analysis):
        console.print(f"[yellow]note:[/] {escape(note)}")


def print_page(page: Page, verdict: Verdict) -> None:
    """Print a page's open tables, the sizes of its closed ones, and the verdict with its reasons."""
    console = table_console()
    for section in page.sections:
        for table in (table for table in section.tables if table.rows):
            if section.closed:
                console.print(f"{section.title}: {len(table.rows)}, listed in the page", markup=False)
            else:
                print_table(replace(table, title=table.title or section.title), console)
    text = "\n".join([f"[bold]{escape(page.title)}[/]", *(escape(words.text) for words in page.verdicts)])
    console.print(Panel.fit(text, border_style=_COLOURS.get(verdict, "yellow")))


def print_table(table: Table, console: Console) -> None:
    table = table.filled()
    shown = rich_table.Table(*table.columns, title=escape(table.title), title_style="bold")
    for row in table.rows:
        cells = (cell for cell in row if not isinstance(cell, str))
        shown.add_row(*(f"[{_STYLES[cell.tone]}]{escape(cell.text)}[/]" for cell in cells))
    console.print(shown)


def print_model(fit: Fit, points: Sequence[PredictedPoint]) -> None:
    """Print the fitted unknowns, and every published figure with the model's value."""
    console = table_console()
    rows = []
    for point in points:
        metric = METRICS[point.key]
        error = "calibrated" if point.calibrated else f"{point.error:+.1%}"
        values = (number(point.published, metric), number(point.predicted, metric))
        rows.append([point.source, f"{point.point} {point.side}", metric.title, *values, error])
    columns = ("article", "point", "figure", "published", "model", "error")
    print_table(Table(columns, rows, "8x MI325X, 10240 in / 512 out"), console)
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
    rows = []
    for choice in found:
        tokens = str(choice.steps + 1) if choice.steps else "no speculation"
        values = (f"{choice.accept_length:.2f}", f"{choice.tpot_ms:.2f} ms", f"{choice.throughput_tok_s:,.0f} tok/s")
        rows.append([str(choice.steps), tokens, *values, "best" if choice is best else ""])
    columns = ("draft steps", "draft tokens", "accept length", "TPOT", "output throughput", "")
    print_table(Table(columns, rows, title), console)

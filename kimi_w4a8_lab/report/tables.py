"""Pages and tables on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich import table as rich_table
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

from kimi_w4a8_eagle3.base.console import table_console

from ..predict.predict import Choice, Fit, Load, PredictedPoint, mean_error
from ..speed.statistics import METRICS
from .measured import number
from .page import Page, Table, Tone, write_page

_STYLES: dict[Tone, str] = {"": "none", "better": "green", "worse": "red", "soft": "dim"}


def conclude(page: Page, folder: Path, console: Console | None = None) -> None:
    """Show a page on the terminal, write it into `folder`, and print its path."""
    console = console or table_console()
    print_page(page, console)
    console.print(f"page: {write_page(page, folder)}", markup=False, soft_wrap=True)


def print_page(page: Page, console: Console) -> None:
    """Print the notes, the verdict with its reasons, and the figures; without figures first the open tables."""
    for section in () if page.figures else page.sections:
        for table in (table for table in section.tables if table.rows):
            if section.closed:
                console.print(f"{section.title}: {len(table.rows)}, listed in the page", markup=False)
            else:
                print_table(replace(table, title=table.title or section.title), console)
    for note in page.notes:
        console.print(f"[yellow]note:[/] {escape(note)}")
    text = "\n".join([f"[bold]{escape(page.title)}[/]", *(escape(words.text) for words in page.verdicts)])
    console.print(Panel.fit(text, border_style=_STYLES[page.tone] if page.tone in ("better", "worse") else "yellow"))
    for line in page.figures:
        console.print(f"[{_STYLES[line.tone]}]{escape(line.text)}[/]", soft_wrap=True)


def print_table(table: Table, console: Console) -> None:
    table = table.filled()
    shown = rich_table.Table(*table.columns, title=escape(table.title), title_style="bold")
    for row in table.rows:
        cells = (cell for cell in row if not isinstance(cell, str))
        shown.add_row(*(f"[{_STYLES[cell.tone]}]{escape(cell.text)}[/]" for cell in cells))
    console.print(shown)


def print_points(points: Sequence[PredictedPoint]) -> None:
    """Print every published figure with the model's value."""
    rows = []
    for point in points:
        metric = METRICS[point.key]
        error = "calibrated" if point.calibrated else f"{point.error:+.1%}"
        values = (number(point.published, metric), number(point.predicted, metric))
        rows.append([point.source, f"{point.point} {point.side}", metric.title, *values, error])
    columns = ("article", "point", "figure", "published", "model", "error")
    print_table(Table(columns, rows, "8x MI325X, 10240 in / 512 out"), table_console())


def print_fit(fit: Fit, points: Sequence[PredictedPoint]) -> None:
    """Print the fitted unknowns and the model's mean error."""
    table_console().print(
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

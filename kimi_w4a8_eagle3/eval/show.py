"""Console output of a run: progress, its result.json as tables, and the verdict with reasons and exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from ..base.verdict import Verdict

_COLOURS = {Verdict.PASS: "green", Verdict.FAIL: "red", Verdict.INVALID: "red"}
_LISTED = 5


def run(folder: Path, console: Console) -> int:
    """Print the result of an accuracy or tool-call run and return the exit code."""
    result = json.loads((folder / "result.json").read_text())
    verdict, requests = result["verdict"], result["requests"]
    console.print(_accuracies(result))
    if verdict["references"]:
        console.print(_references(verdict["references"]))
    if verdict["paired"]:
        console.print(_paired(verdict["paired"]))
    for item in verdict["differing"][:_LISTED]:
        console.print(f"  problem {item['id']} (answer {item['target']}): {item['solved_by']}", markup=False)
    if len(verdict["differing"]) > _LISTED:
        console.print(f"  ... {len(verdict['differing'])} differing problems in result.json, with both answers")
    for check in result.get("checks", ()):
        console.print(f"{'✓' if check['passed'] else '✗'} {check['name']}: {check['found']} (wanted {check['wanted']})")
    for item in result.get("invalid", ())[:_LISTED]:
        console.print(f"  invalid call: {item['problem']}; {item['calls']}", markup=False)
    ended = (
        f"ended with {result['finish_reasons']}"
        if "finish_reasons" in result
        else (
            f"{verdict['truncated']} cut at the token limit, {verdict['without_marker']} answers without ####, "
            f"{verdict['empty']} empty"
        )
    )
    console.print(
        f"{verdict['problems']} requests: {verdict['failed']} failed, {ended}; {requests['asked']} asked, "
        f"{requests['reused']} reused from the interrupted run, {requests['retries']} retries"
    )
    return conclude(Verdict(verdict["state"]), verdict["reasons"], folder, console)


def conclude(state: Verdict, reasons: list[str], folder: Path, console: Console) -> int:
    """Print the verdict as a panel and return its exit code."""
    text = "\n".join([f"[bold]{state.headline}[/]", *map(escape, reasons), f"[dim]{folder}[/]"])
    console.print(Panel.fit(text, border_style=_COLOURS.get(state, "yellow")))
    return state.exit_code


def _accuracies(result: dict[str, Any]) -> Table:
    table = Table(title=f"{result['task']}, {result['configuration']}", title_style="bold")
    for column in ("metric", "solved", "accuracy", "95 % interval"):
        table.add_column(column)
    for item in result["verdict"]["accuracies"]:
        i = item["interval"]
        shown = (f"{i['value']:.2%}", f"{i['low']:.2%} to {i['high']:.2%}") if i else ("-", "-")
        table.add_row(item["metric"], f"{item['correct']} of {item['answered']}", *shown)
    return table


def _references(found: list[dict[str, Any]]) -> Table:
    table = Table(title="reported elsewhere", title_style="bold")
    for column in ("configuration", "metric", "accuracy", "ours", "90 % interval"):
        table.add_column(column)
    for item in found:
        reference = item["reference"]
        accuracy, difference = f"{reference['accuracy']:.2%} of {reference['n']}", item["difference"]
        limits = f"{difference['low']:+.2%} to {difference['high']:+.2%}"
        table.add_row(reference["configuration"], reference["metric"], accuracy, f"{difference['value']:+.2%}", limits)
    return table


def _paired(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="solved problems, this run and the baseline", title_style="bold")
    for column in ("metric", "both", "only this run", "only the baseline", "neither", "McNemar p"):
        table.add_column(column, justify="right")
    for row in rows:
        counts = (str(row[name]) for name in ("both", "only_new", "only_base", "neither"))
        table.add_row(row["metric"], *counts, f"{row['mcnemar_p']:.3g}")
    return table

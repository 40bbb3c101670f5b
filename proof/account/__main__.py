"""`python -m proof.account -c 40`: the account of one load as tables or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import typer
from rich.table import Table

from kimi_w4a8_eagle3.base.console import table_console
from kimi_w4a8_eagle3.cli import run
from kimi_w4a8_lab.predict.machine_model import Cluster
from kimi_w4a8_lab.predict.predict import Load, calibrate, published_accept_length

from . import levers, plans, prefill
from .parts import Account, explain


def main(
    concurrency: int = typer.Option(40, "--concurrency", "-c", help="Requests in flight."),
    accept_length: float | None = typer.Option(None, "--accept-length", "-l", help="Default: the published one."),
    steps: int = typer.Option(3, "--steps", min=1, help="Draft steps at which the accept length is known."),
    input_len: int = typer.Option(10240, "--input-len", help="Tokens of a prompt."),
    output_len: int = typer.Option(512, "--output-len", help="Tokens of an answer."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show the parts of a step and of a prefill on 8x MI325X, and what each change alone would give."""
    length = published_accept_length(concurrency) if accept_length is None else accept_length
    load, cluster = Load(concurrency, input_len, output_len, steps=steps, accept_length=length), Cluster()
    fit = calibrate(cluster)
    found = explain(load, fit, cluster)
    alone = levers.levers(found, fit, cluster)
    changes = [levers.now(found), *alone, levers.together(found, alone), *levers.costs(found)]
    ways = prefill.ways(found, alone, cluster)
    if as_json:
        more = {"changes": [asdict(change) for change in changes], "ways": [asdict(way) for way in ways]}
        typer.echo(json.dumps(asdict(found) | more, indent=2))
    else:
        print_account(found, changes, ways)
        moe = next(lever.change for lever in alone if lever.change.name == "MoE kernels of this package")
        print_plans(found, cluster, moe)


def print_account(account: Account, changes: Sequence[levers.Lever], ways: Sequence[prefill.Shrinking]) -> None:
    """Print the parts of a step and of a prefill, the effect of the changes, and what could shrink the prefill."""
    console, load = table_console(), account.load
    titles = f"step of {load.concurrency} requests x {load.steps + 1} tokens", f"prefill of {load.input_len} tokens"
    totals = (account.step, account.step_ms), (account.prefill, account.prefill_ms)
    for title, (rows, total) in zip(titles, totals, strict=True):
        names = "part", "ms", "+-", "share", "launches", "formula", "calibration"
        table = Table(*names, title=f"{title}, {total:.1f} ms")
        for row in rows:
            figures = f"{row.ms:.2f}", f"{abs(row.ms * row.uncertainty):.2f}", f"{row.ms / total:.0%}"
            table.add_row(row.name, *figures, str(row.launches or ""), row.formula, row.source)
        console.print(table)
    columns = "change, alone", "ms per step", "ms per prefill", "TPOT", "throughput", "setting", "known fault"
    table = Table(*columns, title="possible changes, by the model")
    for lever in changes:
        saved = (f"{-ms:+.2f}" if ms else "" for ms in (lever.change.step_ms, lever.change.prefill_ms))
        reached = f"{lever.tpot_ms:.2f} ms", f"{lever.throughput_tok_s:,.0f} tok/s"
        table.add_row(lever.change.name, *saved, *reached, "\n".join(lever.change.settings), ", ".join(lever.faults))
    console.print(table)
    table = Table("part of a prefill", "way to shrink it", "ms", "setting", title="prefill, by its largest parts")
    for way in ways:
        table.add_row(*prefill.cells(way))
    console.print(table)
    console.print(f"totals: {account.source}, with AITER's kernels")


def print_plans(account: Account, cluster: Cluster, moe: levers.Change) -> None:
    """Print the recipes beside the published figures and the floor, and what is left to win."""
    console, (rows, left) = table_console(), plans.table_rows(account, cluster, moe)
    figures = Table("", "prefill, ms", "step, ms", "TPOT, ms", "TTFT, s", "tok/s", "gain", title="recipes")
    more = Table("on top of `agent`", "prefill, ms", "step, ms", "tok/s", "verdict", title="what is left")
    for row in rows:
        figures.add_row(*row)
    for row in left:
        more.add_row(*row)
    console.print(figures)
    console.print(more)


if __name__ == "__main__":
    run(lambda: typer.run(main))

"""`kimi-w4a8 bench`: measure, compare, predict."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from kimi_w4a8_eagle3.base.console import table_console
from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.next_step import command
from kimi_w4a8_eagle3.commands.options import KEY_FILE, RUNS, complete
from kimi_w4a8_eagle3.gateway.settings import client_key
from kimi_w4a8_eagle3.recipe.schema import PLAIN, load_recipe

from ..base.server_under_test import Target
from ..predict.machine_model import Cluster
from ..predict.predict import Load, calibrate, check, choices, published_accept_length
from ..report.analysis import Analysis
from ..report.changes import require_hits
from ..report.measured import page
from ..report.page import Table
from ..report.tables import conclude, print_choices, print_fit, print_page, print_points, print_table
from ..speed import inferencex
from ..speed.bench import Plan, Texts, bench
from ..speed.runs import Run, grouped, read_run
from ..speed.statistics import METRICS
from ..speed.workloads import Workload, load_workload, with_changes, workload_names
from .groups import expanded, signals


class _WorkloadGroup(TyperGroup):
    """Group in which `kimi-w4a8 bench con2` is short for `kimi-w4a8 bench run con2`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["run", *args]
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete the short form, too."""
        workload = self.commands["run"].params[0]
        return [*super().shell_complete(ctx, incomplete), *workload.shell_complete(ctx, incomplete)]


app = typer.Typer(
    cls=_WorkloadGroup, no_args_is_help=True, help="Measure a server: `kimi-w4a8 bench con2`, or another workload."
)


@dataclass(frozen=True)
class Changes:
    """Changes to a workload, shared by `run` and `ab`."""

    sharegpt: str = typer.Option("", "--sharegpt", help="ShareGPT JSON file to send; default: from the Hub.")
    prompts: str = typer.Option(
        "",
        "--prompts-file",
        help="Your own text instead: ShareGPT .json, .jsonl, .txt, or hf://datasets/OWNER/NAME/FILE.",
    )
    concurrency: list[int] = typer.Option([], "--concurrency", "-c", help="Instead of the workload's; may be repeated.")
    seed: list[int] = typer.Option([], "--seed", help="Instead of the workload's; may be repeated.")
    num_prompts: int | None = typer.Option(None, "--num-prompts", "-n", help="Instead of the workload's.")
    input_len: int | None = typer.Option(None, "--input-len", help="Tokens of a `random` prompt.")
    output_len: int | None = typer.Option(None, "--output-len", help="Tokens of an answer, instead of the workload's.")

    def workload(self, name: str) -> Workload:
        fields = {"num_prompts": self.num_prompts, "input_len": self.input_len, "output_len": self.output_len}
        return with_changes(load_workload(name), concurrency=self.concurrency, seeds=self.seed, **fields)

    def texts(self) -> Texts:
        return Texts(self.sharegpt or None, self.prompts or None)


@dataclass(frozen=True)
class Kept:
    """Settings of the servers and place of the run, shared by `run`, `ab` and `sweep`."""

    settings: list[str] = typer.Option([], "--set", help="For the recipe, as in `kimi-w4a8 serve`.")
    runs: Path = RUNS
    resume: Path | None = typer.Option(None, "--resume", help="Run to finish; give the other options again, too.")

    def measured(self, sides: Sequence[Target], works: list[Workload], texts: Texts, *counts: int) -> Run:
        """Measure the sides in turn, print the page of the run and the next command, and return the run."""
        with signals(self.runs):
            folder = bench(Plan(sides, works, *counts), texts, self.runs, typer.echo, self.resume)
        run = read_run(folder)
        conclude(page(Analysis([run], sides[0].name)), folder)
        typer.echo(f"next: {command()} report {folder}   # add other runs for one page of all")
        return run

    def recipes(self, *names: str) -> list[Target]:
        """Return the sides of a comparison."""
        key = client_key(None, os.environ)
        return [Target(recipe=name, settings=tuple(self.settings), api_key=key) for name in names]


@app.command("list", epilog="Example: kimi-w4a8 bench list")
def list_workloads(as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
    """List the workloads."""
    if as_json:
        typer.echo(json.dumps({name: load_workload(name).model_dump() for name in workload_names()}, indent=2))
        return
    works = map(load_workload, workload_names())
    rows = [
        [work.name, work.summary, ", ".join(map(str, work.concurrency)), str(len(work.seeds)), work.compares]
        for work in works
    ]
    columns = ("workload", "what it measures", "concurrency", "seeds", "compares with")
    print_table(Table(columns, rows), table_console())


@app.command("run", epilog="Example: kimi-w4a8 bench run con40 --recipe agent")
@expanded
def run(
    workload: str = typer.Argument(
        metavar="WORKLOAD",
        help="Name of a workload (`kimi-w4a8 bench list`), or a TOML file with one.",
        autocompletion=complete(workload_names),
    ),
    *,
    load: Changes,
    base_url: str = typer.Option("", "--base-url", help="Measure this running server (recipes' default port: 9527)."),
    recipe: str = typer.Option(
        "",
        "--recipe",
        "-r",
        help="Start this recipe (RECIPE:plain: without its draft); with --base-url: the recipe it serves.",
    ),
    api_key_file: Path | None = KEY_FILE,
    kept: Kept,
) -> None:
    """Run one workload, and compare it with the published figures.

    This needs SGLang on this machine for its load generator. No extra installs SGLang: use its image, or `make venv`.
    """
    key = client_key(api_key_file, os.environ)
    target = Target(base_url or None, recipe or None, None, tuple(kept.settings), key, runs=kept.runs)
    kept.measured([target], [load.workload(workload)], load.texts())


@app.command("ab", epilog="Example: kimi-w4a8 bench ab --a agent:plain --b agent")
@expanded
def ab(
    a: str = typer.Option(..., "--a", help="First side: a recipe, or RECIPE:plain (no drafts)."),
    b: list[str] = typer.Option(..., "--b", help="Second side; more with another --b."),
    workload: list[str] = typer.Option(
        ["con2", "con40"], "--workload", "-w", metavar="WORKLOAD", help="May be repeated."
    ),
    repeats: int = typer.Option(4, "--repeats", min=1, help="Measurements of each workload and side."),
    rounds: int = typer.Option(2, "--rounds", min=1, help="Server starts per side; 2 gives the order A B B A."),
    *,
    load: Changes,
    kept: Kept,
) -> None:
    """Measure two or more sides in turn, and compare them.

    This needs SGLang, which no extra installs: use its image, or `make venv`.
    """
    works = [load.workload(name) for name in dict.fromkeys(workload)]
    require_hits(grouped([kept.measured(kept.recipes(a, *b), works, load.texts(), repeats, rounds)]))


@app.command("sweep", epilog="Example: kimi-w4a8 bench sweep --recipe agent -w 8k1k -c 1 -c 40")
@expanded
def sweep(
    recipe: list[str] = typer.Option(
        ..., "--recipe", "-r", help="Measured with and without its draft; more recipes or layouts with another -r."
    ),
    workload: list[str] = typer.Option(
        ["1k1k", "1k8k", "8k1k", "con40"], "--workload", "-w", metavar="WORKLOAD", help="Shapes."
    ),
    repeats: int = typer.Option(1, "--repeats", min=1, help="Measurements of each point and side."),
    *,
    load: Changes,
    kept: Kept,
) -> None:
    """Measure recipes over shapes and concurrencies.

    The page has the speed-up by shape, and files in InferenceX's form lie beside it. This needs SGLang, which no extra
    installs: use its image, or `make venv`.
    """
    works = [load.workload(name) for name in dict.fromkeys(workload)]
    names = dict.fromkeys(side for name in recipe for side in _with_and_without(name))
    run = kept.measured(kept.recipes(*names), works, load.texts(), repeats)
    if (made := inferencex.export(run)) is not None:
        typer.echo(f"InferenceX's form: {made}")


def _with_and_without(recipe: str) -> list[str]:
    """Return the sides of a recipe: without its draft and with it, or alone if it has none or names its variant."""
    alone = recipe.endswith(PLAIN) or load_recipe(recipe).draft is None
    return [recipe] if alone else [f"{recipe}{PLAIN}", recipe]


@app.command("compare", epilog="Example: kimi-w4a8 bench compare RUN OTHER")
def compare(
    runs: list[Path] = typer.Argument(
        metavar="RUN", help="Run directories of `kimi-w4a8 bench`, from this machine or another."
    ),
    base: str = typer.Option("", "--base", help="Side that the others are compared with; default: the first measured."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Compare the sides of earlier runs.

    Crashed or failed runs are left out, with the reason.
    """
    analysis = Analysis([read_run(run) for run in runs], base or None)
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in analysis.changes], indent=2, default=str))
    else:
        if not analysis.changes:
            raise KimiError(
                "nothing to compare",
                where=", ".join(map(str, runs)),
                expected="usable measurements of one workload and concurrency on at least two sides",
                remedy="run the same workload on another recipe, or use `kimi-w4a8 bench ab`",
            )
        print_page(page(analysis, charts=False, figures=METRICS), table_console())
    require_hits(analysis.groups)


@app.command("predict", epilog="Example: kimi-w4a8 bench predict -c 40 -l 2.7")
def predict(
    concurrency: int = typer.Option(40, "--concurrency", "-c", help="Requests in flight."),
    accept_length: float | None = typer.Option(
        None, "--accept-length", "-l", help="Of the text, with --steps draft steps; default: the published one."
    ),
    steps: int = typer.Option(3, "--steps", min=1, help="Draft steps, at which --accept-length is known."),
    input_len: int = typer.Option(10240, "--input-len", help="Tokens of a prompt."),
    output_len: int = typer.Option(512, "--output-len", help="Tokens of an answer."),
    calibration: bool = typer.Option(False, "--calibration", help="Also print each published figure and the model's."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Predict TPOT, throughput and the best number of draft steps.

    The figures are for 8x MI325X and follow from first principles.
    """
    length = published_accept_length(concurrency) if accept_length is None else accept_length
    load = Load(concurrency, input_len, output_len, steps=steps, accept_length=length)
    cluster = Cluster()
    fit = calibrate(cluster)
    points = check(fit, cluster)
    found = choices(load, fit, cluster)
    if as_json:
        shown = {"fit": asdict(fit), "points": [asdict(point) for point in points], "steps": [asdict(c) for c in found]}
        typer.echo(json.dumps(shown, indent=2, default=str))
    else:
        print_choices(load, found)
        if calibration:
            print_points(points)
        print_fit(fit, points)

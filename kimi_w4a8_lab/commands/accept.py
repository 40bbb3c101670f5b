"""`kimi-w4a8 accept`: checks on a machine with GPUs that cannot run without them."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import typer

from kimi_w4a8_eagle3.base.console import table_console
from kimi_w4a8_eagle3.commands.options import RUNS
from kimi_w4a8_eagle3.gateway.settings import client_key
from kimi_w4a8_eagle3.machine.hardware import Machine
from kimi_w4a8_eagle3.recipe.schema import load_recipe

from ..report.tables import conclude
from ..speed.texts import Texts
from .eval import require_packages
from .groups import signals


def accept(
    recipe: list[str] = typer.Option(
        [], "--recipe", "-r", help="May be repeated; the first one is tested most. Default: agent; without GPUs: tiny."
    ),
    full: bool = typer.Option(
        False, "--full", help="Also run download, kernels, tiles, GSM8K, chat, the articles' recipes: takes hours."
    ),
    quick: bool = typer.Option(False, "--quick", help="A few prompts per stage: a test run without figures."),
    restart: bool = typer.Option(False, "--restart", help="Start a new run instead of resuming the last one."),
    sharegpt: str = typer.Option("", "--sharegpt", help="ShareGPT JSON file to send; default: fetched from the Hub."),
    data_dir: Path | None = typer.Option(None, "--data-dir", help="GSM8K: train.jsonl and test.jsonl (no Hub)."),
    runs: Path = RUNS,
) -> None:
    """Accept what this machine serves: stages, a page and a bundle.

    It takes an hour on eight MI325X, and begins with a timetable. A stage that fails is recorded, and the others go
    on. A machine that lacks the GPUs of a recipe is refused. --quick does not judge speed. The same command runs only
    what failed, was slow or has not run.
    """
    require_packages()
    from ..accept import claims, journal, stages  # optional: lm_eval

    machine = Machine.detect()
    sizes = replace(stages.QUICK if quick else stages.Sizes(), full=full)
    recipes = recipe or (list(stages.ON_GPUS if full else stages.ON_GPUS[:1]) if machine.devices else ["tiny"])
    texts, console = Texts(sharegpt=sharegpt or None), table_console()
    served = [f"{name} ({load_recipe(name).model.repo})" for name in recipes]  # an unknown one leaves no run
    scope = f"{'quick run' if quick else 'run'}{' with --full' if full else ''} of {', '.join(served)}"
    kept = journal.open_run(runs, {"scope": scope, "sizes": str(sizes)}, restart)
    run = stages.AcceptRun(kept.folder, recipes, sizes, console, texts, data_dir, client_key(None, os.environ), machine)
    console.print(f"kimi-w4a8 accept: results are kept in {kept.folder}")
    try:
        with signals(runs), ExitStack() as engines:
            engines.callback(run.stop)
            journal.run_stages(run.stages(), kept, console.print)
    finally:
        conclude(claims.page(kept.result), kept.folder, console)
        console.print(f"bundle: {claims.write_bundle(kept.folder)}", markup=False, soft_wrap=True)

"""`kimi-w4a8 serve`: show or start the server of a recipe."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from ..base.errors import UsageError
from ..base.finding import LABELS, STYLES, Finding, Severity
from ..machine.hardware import GPUS
from ..recipe.arguments import check_host, require_parsed
from ..recipe.launch import Launch, prepare
from ..recipe.schema import one_recipe
from .options import DRAIN_TIMEOUT, OPS_HOST, OPS_PORT, RECIPE, RECIPE_NAME, RUNS, complete

# Allows engine arguments that only the engine knows, after `--`.
CONTEXT_SETTINGS = {"allow_extra_args": True}


def serve(
    context: typer.Context,
    name: str | None = RECIPE_NAME,
    recipe: str | None = RECIPE,
    dry_run: bool = typer.Option(False, "--dry-run", help="Print environment and SGLang's command, start nothing."),
    host: str | None = typer.Option(None, "--host", help="Address to listen on; default: the recipe's, loopback."),
    port: int | None = typer.Option(None, "--port", min=1, max=65535, help="Port to listen on; default: the recipe's."),
    tp: int | None = typer.Option(None, "--tp", min=1, help="GPUs per engine; default: the recipe's."),
    served_model_name: str | None = typer.Option(None, "--served-model-name", help="The model's name for clients."),
    settings: list[str] = typer.Option([], "--set", help="An engine argument or a dotted recipe key."),
    gpu: str = typer.Option(
        "",
        "--gpu",
        help="Compute memory for this GPU (mi325x, ...) instead of this machine's.",
        autocompletion=complete(GPUS.keys),
    ),
    model: Path | None = typer.Option(None, "--model", help="Serve this directory instead of the recipe's model."),
    draft: Path | None = typer.Option(None, "--draft", help="Draft directory instead of the recipe's draft."),
    as_json: bool = typer.Option(False, "--json", help="With --dry-run: print JSON."),
    any_hardware: bool = typer.Option(False, "--any-hardware", help="Start even on other hardware than the recipe's."),
    ops_port: int | None = OPS_PORT,
    ops_host: str = OPS_HOST,
    drain_timeout: float = DRAIN_TIMEOUT,
    api_key_file: Path | None = typer.Option(None, "--api-key-file", help="File with the key that clients must send."),
    runs: Path = RUNS,
    no_preflight: bool = typer.Option(False, "--no-preflight", help="Start without checking the checkpoint files."),
) -> None:
    """Serve a recipe, or show what would run.

    Engine arguments may follow after `--`. SIGTERM lets running requests finish, SIGINT does not. SIGHUP drains the
    engine and starts it again with its checkpoints as they are now.
    """
    if as_json and not dry_run:
        raise UsageError("only a dry run prints JSON", where="--json", expected="--dry-run --json")
    check_host(ops_host, "--ops-host")
    extra = context.args
    if recipe and name and name.startswith("-"):  # in `-r tiny -- --port 1` the first word after `--` lands in RECIPE
        extra, name = [name, *extra], None
    named = {"host": host, "port": port, "tp": tp, "served-model-name": served_model_name}
    settings = settings + [f"{key}={value}" for key, value in named.items() if value is not None]
    launch = prepare(
        one_recipe(name, recipe),
        settings,
        extra,
        gpu=gpu,
        checkpoints={"model": model, "draft": draft},
        api_key_file=api_key_file,
        read_keys=not dry_run,  # a manifest may name a file that only its container has
    )
    if no_preflight:
        note = Finding("--no-preflight: the checkpoint files were not validated", Severity.OVERRIDE)
        launch = replace(launch, notes=[*launch.notes, note])
    if launch.untested:
        require_parsed(launch.args)
    if as_json:
        typer.echo(json.dumps(launch.described(), indent=2))
    elif dry_run:
        _show(launch, "this would run; nothing was started")
    else:
        options = {"ops_host": ops_host, "ops_port": ops_port, "drain_timeout_s": drain_timeout, "runs": runs}
        raise typer.Exit(_start(launch, preflight=not no_preflight, hardware=not any_hardware, **options))


def _start(launch: Launch, **options: Any) -> int:
    """Serve until the end, and return the exit code; options: the fields of `ServeOptions`."""
    # Start-up: a dry run needs no supervisor.
    from ..supervision.checks import ServeOptions, ready_to_serve
    from ..supervision.serve import serve_foreground

    asked = ServeOptions(**options)
    launch = ready_to_serve(launch, asked)
    if sys.stdout.isatty():  # run.json has the command
        _print_notes(launch)
    else:
        _show(launch, "the engine starts with this environment and command")
    return serve_foreground(launch, asked)


def _show(launch: Launch, what: str) -> None:
    typer.echo(launch.shell())
    typer.echo(f"# {what}", err=True)
    _print_notes(launch)


def _print_notes(launch: Launch) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for note in launch.notes:
        console.print(f"# {LABELS[note.severity]}{note.found}", style=STYLES[note.severity], markup=False)

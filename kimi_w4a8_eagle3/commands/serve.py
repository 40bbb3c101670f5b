"""`kimi serve`: show or start the server of a recipe."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

if TYPE_CHECKING:
    from ..recipes import Launch


def serve(
    context: typer.Context,
    recipe: str = typer.Option(..., "--recipe", "-r", help="Name of a packaged recipe, or a TOML file."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the exact environment and command, start nothing."),
    settings: list[str] = typer.Option([], "--set", help="KEY=VALUE: an engine argument or a dotted recipe key."),
    gpu: str = typer.Option("", "--gpu", help="Compute memory for this GPU (mi325x, ...) instead of this machine's."),
    model: Path | None = typer.Option(None, "--model", help="Serve this directory instead of the recipe's model."),
    draft: Path | None = typer.Option(None, "--draft", help="Draft directory instead of the recipe's draft."),
    docker: bool = typer.Option(False, "--docker", help="With --dry-run: print the command that runs it in its image."),
    as_json: bool = typer.Option(False, "--json", help="With --dry-run: print JSON."),
    any_hardware: bool = typer.Option(False, "--any-hardware", help="Start although the machine is not the recipe's."),
) -> None:
    """Serve a recipe, or show what would run. Engine arguments may follow after `--`."""
    from ..aiter_regime import installed_regime
    from ..errors import KimiError
    from ..gates import read_gates
    from ..hardware import Machine, gpu_by_name
    from ..recipes import load_recipe, render, unmet_requirements, with_settings

    machine = Machine.detect()
    chosen = load_recipe(recipe)
    for section, path in (("model", model), ("draft", draft)):
        if path is not None:
            chosen = with_settings(chosen, {f"{section}.repo": str(path.resolve()), f"{section}.revision": "main"})
    launch = render(
        chosen,
        settings,
        context.args,
        machine=machine,
        gpu=gpu_by_name(gpu) if gpu else None,
        regime=installed_regime(),
    )
    read_gates({**os.environ, **launch.env})  # a misspelt gate is an error before anything is loaded
    if docker and launch.image is None:
        raise KimiError(
            f"the recipe {chosen.name!r} names no image",
            where="--docker",
            remedy="see launch/docker-run.sh and Dockerfile",
        )
    if dry_run:
        _show(launch, as_json, docker)
        return
    if not any_hardware and (unmet := unmet_requirements(chosen, machine)):
        raise KimiError(
            f"this machine cannot serve the recipe {chosen.name!r}: {unmet[0]}",
            remedy="add --dry-run to see the command, --any-hardware to start all the same, or use --recipe tiny",
        )
    from ..serving import serve_foreground

    _show(launch, as_json=False, docker=False)
    raise typer.Exit(serve_foreground(launch))


def _show(launch: Launch, as_json: bool, docker: bool) -> None:
    container = launch.docker()
    if as_json:
        fields = ("recipe", "engine", "image", "argv", "env", "model", "draft", "base_url", "notes", "overrides")
        typer.echo(json.dumps({name: getattr(launch, name) for name in fields} | {"docker": container}, indent=2))
        return
    typer.echo(container if docker else launch.shell())
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if container is not None and not docker:
        console.print(
            "# in the image of the published figures (--docker prints this alone):", style="dim", markup=False
        )
        console.print(container, markup=False)
    for note in launch.notes:
        style = "yellow" if note.startswith("warning:") else "cyan" if note.startswith("override:") else "dim"
        console.print(f"# {note}", style=style, markup=False)

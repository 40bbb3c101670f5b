"""`kimi-w4a8 serve`: show or start the server of a recipe."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import typer
from rich.console import Console

from ..base.errors import KimiError, UsageError
from ..door.settings import is_loopback, key_file_environment, read_door
from ..fleet.placement import replica_launches
from ..fleet.serve import ServeOptions, serve_fleet, serve_foreground
from ..gates import read_gates
from ..machine.aiter_regime import installed_regime
from ..machine.hardware import Machine, gpu_by_name
from ..recipe.launch import Launch, load_recipe, resolve, unmet_requirements, with_settings
from ..recipe.schema import ArgValue
from .options import RECIPE, RECIPE_NAME, RUNS, one_recipe

# Allows engine arguments that only the engine knows, after `--`.
CONTEXT_SETTINGS = {"allow_extra_args": True}


def serve(
    context: typer.Context,
    name: str | None = RECIPE_NAME,
    recipe: str | None = RECIPE,
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the exact environment and command, start nothing."),
    settings: list[str] = typer.Option([], "--set", help="KEY=VALUE: an engine argument or a dotted recipe key."),
    gpu: str = typer.Option("", "--gpu", help="Compute memory for this GPU (mi325x, ...) instead of this machine's."),
    model: Path | None = typer.Option(None, "--model", help="Serve this directory instead of the recipe's model."),
    draft: Path | None = typer.Option(None, "--draft", help="Draft directory instead of the recipe's draft."),
    docker: bool = typer.Option(False, "--docker", help="With --dry-run: print the command that runs it in its image."),
    as_json: bool = typer.Option(False, "--json", help="With --dry-run: print JSON."),
    any_hardware: bool = typer.Option(False, "--any-hardware", help="Start even on other hardware than the recipe's."),
    replicas: int = typer.Option(1, "--replicas", min=1, help="Engines on this machine, behind SGLang's router."),
    ops_port: int | None = typer.Option(None, "--ops-port", help="Probes and metrics; default: port + 1; 0: none."),
    ops_host: str = typer.Option("127.0.0.1", "--ops-host", help="Address for probes and metrics."),
    drain_timeout: float = typer.Option(
        120.0, "--drain-timeout", min=0, help="Seconds for running requests at SIGTERM."
    ),
    api_key_file: Path | None = typer.Option(None, "--api-key-file", help="File with the key that clients must send."),
    runs: Path = RUNS,
    no_preflight: bool = typer.Option(False, "--no-preflight", help="Start without checking the checkpoint files."),
) -> None:
    """Serve a recipe, or show what would run. Engine arguments may follow after `--`.

    SIGTERM lets running requests finish, SIGINT does not. With --replicas, SIGHUP restarts one replica after the other.
    """
    machine, extra = Machine.detect(), context.args
    if recipe and name:  # in `-r tiny -- --port 1` the first word after `--` lands in RECIPE
        extra, name = [name, *extra], None
    chosen = load_recipe(one_recipe(name, recipe))
    for section, path in (("model", model), ("draft", draft)):
        if path is not None:
            chosen = with_settings(chosen, {f"{section}.repo": str(path.resolve()), f"{section}.revision": "main"})

    resolved = resolve(chosen, settings, extra)
    known_gpu, regime = gpu_by_name(gpu) if gpu else None, installed_regime()
    launch = resolved.on(machine, known_gpu, regime)
    if no_preflight:
        note = "override: --no-preflight: the checkpoint files were not validated"
        launch = replace(launch, notes=[*launch.notes, note])
    read_gates({**os.environ, **launch.env})  # report a misspelt gate before anything is loaded
    if docker and launch.image is None:
        raise UsageError(
            f"the recipe {chosen.name!r} names no image",
            where="--docker",
            remedy="docker build with this package's Dockerfile, then launch/docker-run.sh serve",
        )
    if dry_run:
        if set(resolved.args) - set(resolve(chosen).args):  # argument names that the recipe's tests do not cover
            _parsed_by_engine(launch)
        _show(launch, as_json, docker)
        return
    if not any_hardware and (unmet := unmet_requirements(chosen, machine)):
        raise KimiError(
            f"this machine cannot serve the recipe {chosen.name!r}: {unmet[0]}",
            remedy="add --dry-run to see the command, --any-hardware to start anyway, or `kimi-w4a8 serve tiny`",
        )

    keys, client_key = _keys(api_key_file)
    if client_key is not None and launch.engine != "sglang":
        raise KimiError(
            f"{launch.engine} has no door, so it cannot require this key",
            where="--api-key-file" if api_key_file else "environment",
            expected="a recipe for SGLang",
            remedy="unset the key and put a proxy that requires one in front",
        )
    options = ServeOptions(
        ops_host, _ops_port(ops_port, launch.port), drain_timeout, keys, client_key, runs, preflight=not no_preflight
    )
    _show(launch, as_json=False, docker=False)
    if client_key is None and not is_loopback(launch.host):
        Console(stderr=True).print(f"# warning: open to the network at {launch.host} without a key", style="yellow")
    if replicas == 1:
        raise typer.Exit(serve_foreground(launch, options))

    def place(part: Machine, arguments: dict[str, ArgValue]) -> Launch:
        return resolved.with_args(**arguments).on(part, known_gpu, regime)

    launches = replica_launches(launch, replicas, machine, place)
    router = launch.recipe.router.resolved(launch.recipe.prefix_cache)
    raise typer.Exit(serve_fleet(launches, launch, router, options))


def _parsed_by_engine(launch: Launch) -> None:
    """Raise UsageError for an argument unknown to the installed SGLang, which would fail much later."""
    if launch.engine != "sglang" or importlib.util.find_spec("sglang") is None:
        return
    words = launch.argv[launch.argv.index("sglang.launch_server") + 1 :]
    modules = ["kimi_w4a8_eagle3.sglang_plugin.run_module", "kimi_w4a8_eagle3.sglang_plugin.check_arguments"]
    variables = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}  # halves the time, see `lean_imports`
    done = subprocess.run([sys.executable, "-m", *modules, *words], env=variables, capture_output=True, text=True)
    if done.returncode == 2:
        raise UsageError(done.stderr.strip().splitlines()[-1], where="the installed SGLang's arguments")


def _keys(api_key_file: Path | None) -> tuple[dict[str, str], str | None]:
    """Return the variables that give the engines the location of the clients' key, and the key for this process."""
    keys = {} if api_key_file is None else key_file_environment(api_key_file)
    return keys, read_door({**os.environ, **keys}).api_key


def _ops_port(asked: int | None, port: int) -> int | None:
    """Return the ops port: by default the port after the engine's; 0 disables probes and metrics."""
    return port + 1 if asked is None else asked or None


def _show(launch: Launch, as_json: bool, docker: bool) -> None:
    container = launch.docker()
    if as_json:
        typer.echo(json.dumps(launch.described() | {"docker": container}, indent=2))
        return
    typer.echo(container if docker else launch.shell())
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if container is not None and not docker:
        console.print("# in the image of the published figures (--docker prints only this):", style="dim", markup=False)
        console.print(container, markup=False)
    for note in launch.notes:
        style = "yellow" if note.startswith("warning:") else "cyan" if note.startswith("override:") else "dim"
        console.print(f"# {note}", style=style, markup=False)

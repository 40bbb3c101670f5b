"""`kimi-w4a8 route`: the router in front of replicas on other machines."""

from __future__ import annotations

from pathlib import Path

import typer

from ..base.errors import UsageError
from ..fleet import discovery
from ..fleet.checks import ServeOptions
from ..fleet.route import route_foreground
from ..recipe.launch import load_recipe, resolve
from ..recipe.router_settings import RouterSettings
from .options import DRAIN_TIMEOUT, OPS_HOST, OPS_PORT, RUNS


def route(
    worker: list[str] = typer.Option([], "--worker", "-w", help="http://HOST:PORT of a replica; may be repeated."),
    workers_dns: str = typer.Option("", "--workers-dns", help="NAME:PORT; every address of the name is a replica."),
    recipe: str = typer.Option("", "--recipe", "-r", help="Recipe with the model's name and the router's settings."),
    settings: list[str] = typer.Option([], "--set", help="KEY=VALUE for the recipe, such as router.policy."),
    host: str = typer.Option("127.0.0.1", "--host", help="Address of the router."),
    port: int = typer.Option(9527, "--port", help="Port of the router."),
    ops_port: int | None = OPS_PORT,
    drain_timeout: float = DRAIN_TIMEOUT,
    ops_host: str = OPS_HOST,
    runs: Path = RUNS,
) -> None:
    """Route requests to replicas on other nodes.

    A replica with another model or other weights is refused. Replicas may come and go: the router checks addresses
    and identities every few seconds.
    """
    if bool(worker) == bool(workers_dns):
        raise UsageError(
            "give exactly one of --worker and --workers-dns", expected="--worker URL ..., or --workers-dns NAME:PORT"
        )
    discover = discovery.static(worker) if worker else discovery.dns(workers_dns)
    router, model = RouterSettings().resolved(prefix_cache=True), None
    if recipe:
        resolved = resolve(load_recipe(recipe), settings)
        chosen, args = resolved.recipe, resolved.args
        router = chosen.router.resolved(chosen.prefix_cache)
        model = str(args["served-model-name"]) if "served-model-name" in args else str(args["model-path"])
    elif settings:
        raise UsageError("--set needs a recipe", where="--set", expected="--recipe together with --set")
    options = ServeOptions(ops_host, ops_port, drain_timeout, runs)
    raise typer.Exit(route_foreground(host, port, model, router, discover, options))

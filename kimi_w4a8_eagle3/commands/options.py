"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import typer

from ..recipe.schema import recipe_names

RUNS = typer.Option(Path("runs"), "--runs", envvar="KIMI_RUNS", help="Folder of the run directories.")


def complete(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a function for the shell: those of the names that begin with the typed text."""

    def matching(typed: str) -> list[str]:
        return [name for name in names() if name.startswith(typed)]

    return matching


RECIPE_NAME = typer.Argument(
    None,
    metavar="RECIPE",
    help="A packaged recipe (agent; agent:plain without its draft) or a TOML file.",
    autocompletion=complete(recipe_names),
)
RECIPE = typer.Option(None, "--recipe", "-r", help="The recipe, as an option.", autocompletion=complete(recipe_names))
KEY_FILE = typer.Option(None, "--api-key-file", help="File with the server's key; default: as in `kimi-w4a8 serve`.")
OPS_PORT = typer.Option(None, "--ops-port", min=0, max=65535, help="Probes and metrics; default: port + 1; 0: none.")
OPS_HOST = typer.Option("127.0.0.1", "--ops-host", help="Address for probes and metrics.")
DRAIN_TIMEOUT = typer.Option(120.0, "--drain-timeout", min=0, help="Seconds for running requests at SIGTERM.")

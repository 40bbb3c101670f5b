"""`kimi demo`: the main job on any machine."""

from __future__ import annotations

from pathlib import Path

import typer


def demo(runs: Path = typer.Option(Path("runs"), "--runs", help="Where the run directory is created.")) -> None:
    """Serve the built-in model with and without EAGLE3, compare texts and speed (about 3 minutes on 2 cores)."""
    from .. import demo as machinery
    from ..serving import Terminated

    try:
        machinery.run(runs)
    except Terminated as stopped:
        typer.echo(f"\nkimi: {stopped} received; the server was stopped", err=True)
        raise typer.Exit(stopped.exit_code) from None

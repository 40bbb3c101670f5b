"""`kimi scale-demo`: replicas, a router, a fault and a rolling restart on any machine."""

from __future__ import annotations

from pathlib import Path

import typer


def scale_demo(runs: Path = typer.Option(Path("runs"), "--runs", help="Where the run directory is created.")) -> None:
    """Two replicas behind SGLang's router under load: kill one, restart both (about 4 minutes on 2 cores)."""
    from ..fleet import scale_demo as machinery
    from ..signals import Terminated

    try:
        machinery.run(runs)
    except Terminated as stopped:
        typer.echo(f"\nkimi: {stopped} received; the replicas and the router were stopped", err=True)
        raise typer.Exit(stopped.exit_code) from None

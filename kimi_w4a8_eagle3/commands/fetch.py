"""`kimi-w4a8 fetch`: download the target and the draft, and verify that they are complete."""

from __future__ import annotations

from typing import Annotated

import typer
from huggingface_hub import constants

from ..base.console import table_console
from ..fetch.session import Session, wanted


def fetch(
    repos: Annotated[list[str] | None, typer.Argument(metavar="[REPO]...", help="Repositories, owner/name.")] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", "-r", help="Fetch a recipe's target and draft, at its revisions.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit (default: main).")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare local files with the Hub's digests, only.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Use no network; list missing files.")] = False,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Number of parallel transfers.")] = 8,
) -> None:
    """Download checkpoints to the Hub's cache, and check every file.

    The cache is in HF_HOME, and a file is checked by its digest. The disk space is checked first. An interrupted
    download resumes with the same command.
    """
    repositories = wanted(repos or [], recipe, revision)
    if not repositories:
        print(f"recipe {recipe}: its models are built in or local, so there is nothing to fetch")
        return
    session = Session(table_console(), jobs)
    offline = offline or constants.HF_HUB_OFFLINE
    try:
        done = [session.run(repository, verify=verify, offline=offline) for repository in repositories]
    except KeyboardInterrupt:
        session.console.print("stopped; complete files are kept, and the same command resumes")
        raise typer.Exit(130) from None
    if not all(done):
        raise typer.Exit(1)

"""`kimi-w4a8 fetch`: download the target and the draft, and verify that they are complete."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from huggingface_hub import constants
from rich.filesize import decimal

from ..base.console import table_console
from ..base.errors import KimiError, UsageError
from ..fetch.download import Repository, Snapshot, hub_repositories
from ..recipe.launch import load_recipe, recipe_names


def fetch(
    repos: Annotated[list[str] | None, typer.Argument(metavar="REPO", help="Repositories, owner/name.")] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", "-r", help="Fetch a recipe's target and draft, at its revisions.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit (default: main).")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare local files with the Hub's digests, only.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Use no network; list missing files.")] = False,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Number of parallel transfers.")] = 8,
    silence: Annotated[float, typer.Option(min=0.5, help="Minutes without a byte before Xet is given up.")] = 5.0,
) -> None:
    """Download checkpoints to the Hub's cache, and check every file.

    The cache is in HF_HOME, and a file is checked by its digest. The disk space is checked first. An interrupted
    download resumes with the same command.
    """
    repositories = _wanted(repos or [], recipe, revision)
    offline = offline or constants.HF_HUB_OFFLINE
    if verify and offline:
        what = "--verify compares with the Hub's digests, and --offline or HF_HUB_OFFLINE forbids to ask for them"
        raise KimiError(what, remedy="verify where the Hub can be reached")
    if not repositories:
        say(f"recipe {recipe}: its models are built in or local, so there is nothing to fetch")
    try:
        if verify or offline:
            good = [_look(repository, verify) for repository in repositories]
        else:
            good = [_bring(repository, jobs, silence * 60) for repository in repositories]
    except KeyboardInterrupt:
        say("stopped; complete files are kept, and the same command resumes")
        raise typer.Exit(130) from None
    if not all(good):
        raise typer.Exit(1)


def say(text: str) -> None:
    """Print a line to the user."""
    table_console().print(text, soft_wrap=True, markup=False)


def _wanted(repos: list[str], recipe: str | None, revision: str | None) -> list[Repository]:
    """Return the repositories named directly or by a recipe; UsageError if there is none."""
    if bool(repos) == bool(recipe):
        what = "a recipe and repositories were given" if repos else "nothing to fetch was named"
        remedy = "for example: kimi-w4a8 fetch --recipe eagle3-opt"
        raise UsageError(what, expected="--recipe NAME, or REPO ...", remedy=remedy)
    if recipe and revision:
        raise UsageError("--revision does not go with --recipe", remedy="drop --revision: the recipe pins its own")
    if mistaken := set(repos) & set(recipe_names()):
        raise UsageError(f"{mistaken.pop()!r} is a recipe", expected="REPO: owner/name", remedy="--recipe")
    if recipe:
        return hub_repositories(load_recipe(recipe))
    return [Repository.named(repo, revision or "main", Path(constants.HF_HUB_CACHE)) for repo in repos]


def _bring(repository: Repository, jobs: int, silence_s: float) -> bool:
    snapshot = repository.fetch(say, jobs, silence_s)
    say(f"{repository.repo} at {snapshot.folder.name}: complete, every digest compared with the Hub's")
    say(f"  {snapshot.folder}")
    return True


def _look(repository: Repository, verify: bool) -> bool:
    """Report on the files that are here; False when some are missing or damaged."""
    here = repository.here()
    if here is None or (not verify and here.sizes is None):
        say(f"{repository}: its list of files is not in the cache: {repository.folder}")
        say(f"  to do, with network access: kimi-w4a8 fetch {repository.repo} --revision {repository.revision}")
        return False
    if verify:
        found = repository.verify(here, say)
        damaged = [mismatch["path"] for mismatch in found.mismatches]
        good = f"{found.checked_count} files, every digest is right"
        return _report(repository, here, damaged, found.missing_paths, good)
    compared = "" if here.verified else "; their digests were never compared: kimi-w4a8 fetch --verify does it"
    return _report(repository, here, [], here.missing, f"all {len(here.present)} files are here{compared}")


def _report(repository: Repository, here: Snapshot, damaged: list[str], missing: Iterable[str], good: str) -> bool:
    sizes = here.sizes or {}
    bad = [f"damaged  {path}: its digest is wrong; deleted" for path in damaged]
    bad += [f"missing  {path}" + (f" ({decimal(sizes[path])})" if path in sizes else "") for path in missing]
    say(f"{repository.repo} at {here.folder.name}: " + (f"{len(bad)} files are missing or damaged" if bad else good))
    bad += [f"to do: kimi-w4a8 fetch {repository.repo} --revision {repository.revision}"] if bad else []
    for line in bad or [str(here.folder)]:
        say(f"  {line}")
    return not bad

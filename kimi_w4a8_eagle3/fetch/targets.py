"""Which repositories a command line means."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import KimiError
from .manifest import Manifest
from .store import DirectoryStore


@dataclass(frozen=True)
class Target:
    """One repository at one revision."""

    repo: str
    revision: str


def targets(repos: list[str], recipe: str | None, revision: str | None, directory: Path | None) -> list[Target]:
    """The repositories named directly, by a recipe, or by the manifest of `directory`; KimiError if none is."""
    if recipe and repos:
        raise KimiError("a recipe and repositories were given", expected="one of the two", remedy="drop one")
    if recipe and revision:
        raise KimiError("--revision does not go with --recipe", remedy="the recipe pins its revisions; drop --revision")
    if recipe:
        return recipe_targets(recipe)
    if repos:
        return [Target(repo, revision or "main") for repo in repos]
    manifest = Manifest.load(DirectoryStore(directory).manifest_path("")) if directory else None
    if manifest:
        return [Target(manifest.listing.repo, revision or manifest.listing.commit)]
    raise KimiError(
        "nothing to fetch was named",
        expected="--recipe NAME, or REPO ..., or --dir with a directory that was fetched before",
        remedy="for example: kimi fetch --recipe eagle3-opt",
    )


def recipe_targets(name: str) -> list[Target]:
    """The Hub repositories of a recipe, target first; empty when its models are built in or local."""
    from ..recipes import load_recipe

    recipe = load_recipe(name)
    checkpoints = [recipe.model] + ([recipe.draft] if recipe.draft else [])
    return [Target(checkpoint.repo, checkpoint.revision) for checkpoint in checkpoints if checkpoint.on_hub]

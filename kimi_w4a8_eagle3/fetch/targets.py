"""Which repositories a command line means."""

from __future__ import annotations

from dataclasses import dataclass

from ..base.errors import KimiError, UsageError
from ..recipe.launch import load_recipe
from .names import RepoName, Revision


@dataclass(frozen=True)
class Target:
    """One repository at one revision."""

    repo: RepoName
    revision: Revision

    @classmethod
    def named(cls, repo: str, revision: str) -> Target:
        """A target that a person named; KimiError for what cannot be one."""
        try:
            return cls(RepoName(repo), Revision(revision))
        except ValueError as error:
            raise KimiError(str(error), expected="owner/name, a branch, tag or commit", remedy="correct it") from None


def targets(repos: list[str], recipe: str | None, revision: str | None) -> list[Target]:
    """The repositories named directly or by a recipe; KimiError if none is."""
    if recipe and repos:
        raise UsageError("a recipe and repositories were given", expected="one of the two", remedy="drop one")
    if recipe and revision:
        raise UsageError("--revision does not go with --recipe", remedy="drop --revision: the recipe pins its own")
    if recipe:
        return recipe_targets(recipe)
    if repos:
        return [Target.named(repo, revision or "main") for repo in repos]
    raise UsageError(
        "nothing to fetch was named",
        expected="--recipe NAME, or REPO ...",
        remedy="for example: kimi-w4a8 fetch --recipe eagle3-opt",
    )


def recipe_targets(name: str) -> list[Target]:
    """The Hub repositories of a recipe, target first; empty when its models are built in or local."""
    recipe = load_recipe(name)
    checkpoints = [recipe.model] + ([recipe.draft] if recipe.draft else [])
    return [Target.named(checkpoint.repo, checkpoint.revision) for checkpoint in checkpoints if checkpoint.on_hub]

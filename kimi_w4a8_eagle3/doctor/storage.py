"""Checks of the checkpoints: presence on this machine, access to the Hub, and space for missing files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..base.files import shortage
from ..base.finding import Finding
from ..fetch.progress import human
from ..fetch.snapshot import Snapshot
from ..recipe.schema import RecipeCheckpoint
from .facts import Facts
from .needs import PUBLISHED_SIZES
from .result import fail, ok, skip, warn


@dataclass(frozen=True)
class Presence:
    """Part of a Hub checkpoint on this machine, in bytes; `known` if the sizes come from a listing."""

    checkpoint: RecipeCheckpoint
    total: int
    missing: int
    known: bool
    verified: bool = False

    @property
    def here(self) -> bool:
        return self.known and self.missing == 0


def presence(facts: Facts, checkpoint: RecipeCheckpoint) -> Presence:
    """Look into the cache; without a list of the repository's files its published size is compared."""
    snapshot = Snapshot.find(checkpoint.repo, checkpoint.revision, facts.probe.cache())
    if snapshot is None or snapshot.sizes is None:
        size = PUBLISHED_SIZES.get(checkpoint.repo, 0)
        present = sum(snapshot.present.values()) if snapshot else 0
        return Presence(checkpoint, size, max(size - present, 0), known=False)
    missing = snapshot.missing
    size = max(sum(missing.values()), 1) if missing else 0
    return Presence(checkpoint, sum(snapshot.sizes.values()), size, known=True, verified=snapshot.verified)


def checkpoints(facts: Facts) -> list[Finding]:
    names = ["model", "draft"]
    return [_checkpoint(facts, names[i], checkpoint) for i, checkpoint in enumerate(facts.needs.checkpoints)]


def _checkpoint(facts: Facts, name: str, checkpoint: RecipeCheckpoint) -> Finding:
    if checkpoint.repo.startswith("builtin:"):
        return ok(name, f"{checkpoint.repo} comes with the package")
    if not checkpoint.on_hub:
        folder = Path(checkpoint.repo).expanduser()
        there = (folder / "config.json").is_file()
        return (
            ok(name, str(folder)) if there else fail(name, f"no config.json in {folder}", "correct the recipe's path")
        )
    found = presence(facts, checkpoint)
    what = f"{checkpoint.repo} at {checkpoint.revision[:12]}"
    if found.here:
        return ok(name, f"{what}: {human(found.total)}, complete" + (", verified" if found.verified else ""))
    state = f"{what}: {human(found.missing)} of {human(found.total)} missing" if found.total else f"{what}: not here"
    command = f"kimi-w4a8 fetch --recipe {facts.needs.recipe}"
    if facts.probe.offline():
        return fail(name, f"{state}, and HF_HUB_OFFLINE forbids downloads", f"unset it, then {command}")
    if problem := facts.hub_problem(checkpoint.repo, checkpoint.revision):
        return fail(name, f"{state}; {problem.what}", problem.remedy or command)
    return warn(name, f"{state}; the Hub has it", command)


def disk(facts: Facts) -> Finding:
    """Check the space in the cache for the missing files of all checkpoints."""
    wanted = [presence(facts, checkpoint) for checkpoint in facts.needs.checkpoints if checkpoint.on_hub]
    if not wanted:
        return skip("disk", "no checkpoint is downloaded for this recipe")
    missing, cache = sum(found.missing for found in wanted), facts.probe.cache()
    _, free = facts.probe.space(cache)
    if error := shortage(cache, missing, "set HF_HOME to a larger disk (a local NVMe loads fastest)", free):
        return fail("disk", f"{error.what} in {cache}", error.remedy)
    return ok("disk", f"{human(free)} free in {cache}, {human(missing)} to fetch")

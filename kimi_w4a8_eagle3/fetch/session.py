"""One run of `kimi-w4a8 fetch`: its repositories, the work on each of them, and the report to the user."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape

from ..base.errors import KimiError, UsageError
from ..recipe.launch import load_recipe, recipe_names
from .download import Repository, compare, damaged, fetch
from .hub import scrub
from .progress import ByteProgress
from .snapshot import Snapshot


def wanted(repos: list[str], recipe: str | None, revision: str | None) -> list[Repository]:
    """Return the repositories named directly or by a recipe; UsageError if there is none."""
    if recipe and repos:
        raise UsageError("a recipe and repositories were given", expected="one of the two", remedy="drop one")
    if recipe and revision:
        raise UsageError("--revision does not go with --recipe", remedy="drop --revision: the recipe pins its own")
    if recipe:
        return wanted_by_recipe(recipe)
    if mistaken := set(repos) & set(recipe_names()):
        raise UsageError(f"{mistaken.pop()!r} is a recipe", expected="REPO: owner/name", remedy="--recipe")
    if repos:
        return [Repository.named(repo, revision or "main", Path(constants.HF_HUB_CACHE)) for repo in repos]
    raise UsageError(
        "nothing to fetch was named",
        expected="--recipe NAME, or REPO ...",
        remedy="for example: kimi-w4a8 fetch --recipe eagle3-opt",
    )


def wanted_by_recipe(name: str) -> list[Repository]:
    """Return the Hub repositories of a recipe, target first; none when its models are built in or local."""
    cache = Path(constants.HF_HUB_CACHE)
    return [Repository.named(one.repo, one.revision, cache) for one in load_recipe(name).checkpoints if one.on_hub]


@dataclass(frozen=True)
class Session:
    """Console that all repositories of one command share; `jobs` files are transferred at once."""

    console: Console
    jobs: int = 8

    def run(self, repository: Repository, *, verify: bool, offline: bool) -> bool:
        """Do one repository. False when it is incomplete or damaged, KimiError when nothing could be done."""
        if verify and offline:
            raise KimiError(
                "--verify compares with the Hub's digests, and --offline or HF_HUB_OFFLINE forbids to ask for them",
                remedy="verify where the Hub can be reached",
            )
        if not verify and not offline:
            return self._fetch(repository)
        snapshot = repository.here()
        if snapshot is None or (offline and snapshot.sizes is None):
            self._say(f"{repository}: " + ("its list of files is not" if snapshot else "not") + " in the cache")
            self._say(f"  {snapshot.folder if snapshot else repository.folder}")
            self._say(f"  to do, with network access: {_command(repository)}")
            return False
        return self._verify(repository, snapshot) if verify else self._look(repository, snapshot)

    def _fetch(self, repository: Repository) -> bool:
        result = fetch(repository, self._show, self.jobs)
        snapshot = result.snapshot
        self._say(f"{repository.repo} at {snapshot.commit}: complete, every digest compared with the Hub's")
        self._say(f"  {decimal(result.fetched)} fetched, {decimal(result.kept)} were already here")
        self._say(f"  {snapshot.folder}")
        if result.without_xet:
            self._say(f"  files came by plain HTTP, not by Xet: {result.without_xet}")
        if repository.revision != snapshot.commit:
            self._say(f"  '{repository.revision}' may move on; pin this state with --revision {snapshot.commit}")
        return True

    def _verify(self, repository: Repository, snapshot: Snapshot) -> bool:
        found = compare(repository, snapshot, self._show)
        if found.mismatches or found.missing_paths:
            return self._complain(repository, snapshot, found.missing_paths, damaged(found))
        size = decimal(sum(snapshot.present.values()))
        self._say(f"{repository.repo} at {snapshot.commit}: {found.checked_count} files, {size}, every digest is right")
        return True

    def _look(self, repository: Repository, snapshot: Snapshot) -> bool:
        if missing := snapshot.missing:
            return self._complain(repository, snapshot, missing)
        self._say(f"{repository.repo} at {snapshot.commit}: all {len(snapshot.present)} files are here")
        self._say(f"  {snapshot.folder}")
        if not snapshot.verified:
            self._say("  their digests were never compared: kimi-w4a8 fetch --verify does it")
        return True

    def _complain(
        self, repository: Repository, snapshot: Snapshot, missing: Iterable[str], wrong: Iterable[str] = ()
    ) -> bool:
        sizes = snapshot.sizes or {}
        bad = [f"damaged  {path}: its digest is wrong; deleted" for path in wrong]
        bad += [f"missing  {path}" + (f" ({decimal(sizes[path])})" if path in sizes else "") for path in missing]
        self._say(f"{repository.repo} at {snapshot.commit}: {len(bad)} files are missing or damaged")
        for line in bad:
            self._say(f"  {line}")
        self._say(f"  to do: {_command(repository)}")
        return False

    def _show(self, label: str, total: int) -> ByteProgress:
        return ByteProgress(self.console, label, total)

    def _say(self, text: str) -> None:
        self.console.print(escape(scrub(text)), soft_wrap=True)


def _command(repository: Repository) -> str:
    return shlex.join(["kimi-w4a8", "fetch", repository.repo, "--revision", repository.revision])

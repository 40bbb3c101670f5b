"""One run of `kimi-w4a8 fetch`: which repositories are meant, what was asked for each, and what to tell the user."""

from __future__ import annotations

import shlex
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import constants
from rich.console import Console
from rich.markup import escape

from ..base.errors import UsageError
from ..recipe.launch import load_recipe, recipe_names
from .download import fetch
from .hub import Hub
from .manifest import Manifest
from .model import RemoteFile, human
from .names import RepoName, Revision
from .progress import Advance, show
from .store import Store, arrived, exclusive
from .transfer import disk_error
from .verify import QUARANTINE, Report, recall, survey, verify


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
            raise UsageError(str(error), expected="owner/name, a branch, tag or commit", remedy="correct it") from None


def targets(repos: list[str], recipe: str | None, revision: str | None) -> list[Target]:
    """The repositories named directly or by a recipe; KimiError if none is."""
    if recipe and repos:
        raise UsageError("a recipe and repositories were given", expected="one of the two", remedy="drop one")
    if recipe and revision:
        raise UsageError("--revision does not go with --recipe", remedy="drop --revision: the recipe pins its own")
    if recipe:
        return recipe_targets(recipe)
    if mistaken := set(repos) & set(recipe_names()):
        raise UsageError(f"{mistaken.pop()!r} is a recipe", expected="REPO: owner/name", remedy="--recipe")
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


@dataclass(frozen=True)
class Session:
    """What all targets of one command share: jobs are files that travel at once."""

    console: Console
    jobs: int = 8
    hub: Hub = field(default_factory=Hub.from_environment)
    cache: Path = field(default_factory=lambda: Path(constants.HF_HUB_CACHE))

    def run(self, target: Target, *, verify: bool, offline: bool) -> bool:
        """Do one target; False when it is incomplete or damaged, KimiError when it could not be done at all."""
        store = Store(self.cache, target.repo)
        try:
            if verify:
                return self._verify(target, store, offline)
            return self._offline(target, store) if offline else self._fetch(target, store)
        except OSError as error:
            raise disk_error(error, store.root) from None

    def _fetch(self, target: Target, store: Store) -> bool:
        result = fetch(self.hub, store, target.repo, target.revision, self._show, self.jobs)
        self._say(f"{target.repo} at {result.listing.commit}: complete, every digest checked")
        self._say(f"  {human(result.fetched)} fetched, {human(result.kept)} were already here")
        self._say(f"  {result.folder}")
        if target.revision != result.listing.commit:
            self._say(f"  '{target.revision}' may move on; pin this state with --revision {result.listing.commit}")
        return True

    def _verify(self, target: Target, store: Store, offline: bool) -> bool:
        manifest = recall(store, target.repo, target.revision)
        if manifest is None and not offline:
            listing = self.hub.listing(target.repo, target.revision)
            manifest = Manifest(listing)
        if manifest is None:
            return self._nothing_known(target, store)
        commit = manifest.listing.commit
        with exclusive(store), self._show(f"verifying {target.repo}", manifest.listing.size) as advance:
            report = verify(store, manifest, advance, min(self.jobs, 4))
            manifest.save(store.tree, store.manifest_path(commit))
        if report.complete:
            count = len(manifest.listing.files)
            self._say(
                f"{target.repo} at {commit}: {count} files, {human(manifest.listing.size)}, every digest is right"
            )
        else:
            self._complain(target, store, report)
        return report.complete

    def _offline(self, target: Target, store: Store) -> bool:
        manifest = recall(store, target.repo, target.revision)
        if manifest is None:
            return self._nothing_known(target, store)
        report = survey(store, manifest, served=True)
        if report.complete:
            self._say(f"{target.repo} at {manifest.listing.commit}: all {len(manifest.listing.files)} files are here")
            self._say(f"  {store.snapshot(manifest.listing.commit)}")
            if report.unverified:
                self._say(f"  {len(report.unverified)} of them were never hashed: kimi-w4a8 fetch --verify does it")
        else:
            self._complain(target, store, report)
        return report.complete

    def _complain(self, target: Target, store: Store, report: Report) -> None:
        files, total = report.missing + report.corrupt, len(report.manifest.listing.files)
        self._say(
            f"{target.repo} at {report.manifest.listing.commit}: {len(files)} of {total} files are missing or damaged "
            f"({human(report.missing_bytes)})"
        )
        for file in report.corrupt:
            self._say(f"  damaged  {file.path}: its digest is wrong; set aside as {store.final(file).name}{QUARANTINE}")
        for file in report.missing:
            self._say(f"  missing  {file.path} ({self._state(store, file)})")
        self._say(f"  to do: {_command(target)}")

    @staticmethod
    def _state(store: Store, file: RemoteFile) -> str:
        if not file.digest:
            return "size unknown"
        kept = arrived(store, file)
        return human(file.size) + (f", {human(kept)} of it arrived" if kept else "")

    def _nothing_known(self, target: Target, store: Store) -> bool:
        self._say(f"{target.repo} at {target.revision}: nothing of it is known in {store.root}")
        self._say(f"  to do, with network access: {_command(target)}")
        return False

    def _show(self, label: str, total: int) -> AbstractContextManager[Advance]:
        return show(self.console, label, total)

    def _say(self, text: str) -> None:
        self.console.print(escape(self.hub.scrub(text)), soft_wrap=True)


def _command(target: Target) -> str:
    """The command that fetches `target`."""
    return shlex.join(["kimi-w4a8", "fetch", target.repo, "--revision", target.revision])

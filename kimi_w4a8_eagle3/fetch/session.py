"""One run of `kimi-w4a8 fetch`: its repositories, the work on each of them, and the report to the user."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import constants
from rich.console import Console
from rich.markup import escape

from ..base.errors import UsageError
from ..recipe.launch import load_recipe, recipe_names
from .cache import Manifest, Store, Survey, quarantined, recall, survey, verify
from .download import disk_error, fetch
from .hub import Hub
from .model import human
from .names import RepoName, Revision
from .progress import ByteProgress


@dataclass(frozen=True)
class Wanted:
    """One repository at one revision."""

    repo: RepoName
    revision: Revision

    @property
    def command(self) -> str:
        """The command that fetches it."""
        return shlex.join(["kimi-w4a8", "fetch", self.repo, "--revision", self.revision])

    @classmethod
    def named(cls, repo: str, revision: str) -> Wanted:
        """Parse what a person typed."""
        try:
            return cls(RepoName(repo), Revision(revision))
        except ValueError as error:
            raise UsageError(str(error), expected="owner/name, a branch, tag or commit", remedy="correct it") from None


def wanted(repos: list[str], recipe: str | None, revision: str | None) -> list[Wanted]:
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
        return [Wanted.named(repo, revision or "main") for repo in repos]
    raise UsageError(
        "nothing to fetch was named",
        expected="--recipe NAME, or REPO ...",
        remedy="for example: kimi-w4a8 fetch --recipe eagle3-opt",
    )


def wanted_by_recipe(name: str) -> list[Wanted]:
    """Return the Hub repositories of a recipe, target first; none when its models are built in or local."""
    return [Wanted.named(one.repo, one.revision) for one in load_recipe(name).checkpoints if one.on_hub]


@dataclass(frozen=True)
class Session:
    """Console, Hub and cache that all repositories of one command share; `jobs` files are transferred at once."""

    console: Console
    jobs: int = 8
    hub: Hub = field(default_factory=Hub.from_environment)
    cache: Path = field(default_factory=lambda: Path(constants.HF_HUB_CACHE))

    def run(self, repository: Wanted, *, verify: bool, offline: bool) -> bool:
        """Do one repository. False when it is incomplete or damaged, KimiError when nothing could be done."""
        store = Store(self.cache, repository.repo)
        try:
            if not verify and not offline:
                return self._fetch(repository, store)
            manifest = recall(store, repository.revision)
            if manifest is None and not offline:
                manifest = Manifest(self.hub.listing(repository.repo, repository.revision))
            if manifest is None:
                self._say(f"{repository.repo} at {repository.revision}: not in the cache ({store.root})")
                self._say(f"  to do, with network access: {repository.command}")
                return False
            return self._verify(repository, store, manifest) if verify else self._look(repository, store, manifest)
        except OSError as error:
            raise disk_error(error, store.root) from None

    def _fetch(self, repository: Wanted, store: Store) -> bool:
        result = fetch(self.hub, store, repository.repo, repository.revision, self._show, self.jobs)
        commit = result.listing.commit
        self._say(f"{repository.repo} at {commit}: complete, every digest checked")
        self._say(f"  {human(result.fetched)} fetched, {human(result.kept)} were already here")
        self._say(f"  {result.folder}")
        if result.without_xet:
            self._say(f"  files came by plain HTTP, not by Xet: {result.without_xet}")
        if repository.revision != commit:
            self._say(f"  '{repository.revision}' may move on; pin this state with --revision {commit}")
        return True

    def _verify(self, repository: Wanted, store: Store, manifest: Manifest) -> bool:
        size, count = manifest.listing.size, len(manifest.listing.files)
        with store.exclusive(), self._show(f"verifying {repository.repo}", size) as progress:
            found = verify(store, manifest, progress, min(self.jobs, 4))
            store.save(manifest)
        if found.complete:
            commit = manifest.listing.commit
            self._say(f"{repository.repo} at {commit}: {count} files, {human(size)}, every digest is right")
        return found.complete or self._complain(repository, store, found)

    def _look(self, repository: Wanted, store: Store, manifest: Manifest) -> bool:
        found, commit = survey(store, manifest, served=True), manifest.listing.commit
        if not found.complete:
            return self._complain(repository, store, found)
        self._say(f"{repository.repo} at {commit}: all {len(manifest.listing.files)} files are here")
        self._say(f"  {store.snapshot(commit)}")
        if found.unverified:
            self._say(f"  {len(found.unverified)} of them were never hashed: kimi-w4a8 fetch --verify does it")
        return True

    def _complain(self, repository: Wanted, store: Store, found: Survey) -> bool:
        listing, bad = found.manifest.listing, found.missing + found.corrupt
        count = f"{len(bad)} of {len(listing.files)} files are missing or damaged"
        self._say(f"{repository.repo} at {listing.commit}: {count} ({human(found.missing_bytes)})")
        for file in found.corrupt:
            self._say(f"  damaged  {file.path}: its digest is wrong; set aside as {quarantined(store, file).name}")
        for file in found.missing:
            self._say(f"  missing  {file.path} ({human(file.size) if file.digest else 'size unknown'})")
        self._say(f"  to do: {repository.command}")
        return False

    def _show(self, label: str, total: int) -> ByteProgress:
        return ByteProgress(self.console, label, total)

    def _say(self, text: str) -> None:
        self.console.print(escape(self.hub.scrub(text)), soft_wrap=True)

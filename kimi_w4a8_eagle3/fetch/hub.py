"""List a repository with huggingface_hub, audited, and explain errors of the Hub.

The endpoint and the token come from huggingface_hub's own settings: `HF_ENDPOINT`, `HF_TOKEN`, the token file. No
message shows the token: text from elsewhere passes through `Hub.scrub`.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from urllib.parse import quote

import httpx
from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import RepoFile

from ..base.errors import KimiError
from .audit import Endpoint
from .model import MAX_FILES, Listing, RemoteFile
from .names import Commit, Digest, RepoName, RepoPath, Revision

AGAIN = "repeat the command later; it resumes"
# Exceptions that a hostile or malformed answer causes in huggingface_hub.
STRANGE = (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError, httpx.InvalidURL)


class HubUnreachable(KimiError):
    """The Hub does not answer at all, so asking about another repository is pointless."""


@dataclass(frozen=True)
class Hub(Endpoint):
    """A Hub, the token for it, and the kind of its repositories: `model` or `dataset`."""

    kind: str = "model"

    @classmethod
    def from_environment(cls, kind: str = "model") -> Hub:
        """Return the Hub of HF_ENDPOINT, with the token of HF_TOKEN or `hf auth login`."""
        return cls(constants.ENDPOINT, get_token(), kind=kind)

    def url(self, repo: str, commit: str, path: str) -> str:
        """Return the address of a file. The Hub redirects large files to its storage."""
        prefix = constants.REPO_TYPES_URL_PREFIXES.get(self.kind, "")
        return f"{self.endpoint}/{prefix}{repo}/resolve/{commit}/{quote(path)}"

    def listing(self, repo: str, revision: str, path: str | None = None) -> Listing:
        """Resolve `revision` to a commit and list its files, or only `path`; KimiError when that fails."""
        try:
            name, asked, wanted = RepoName(repo), Revision(revision), path and RepoPath(path)
        except ValueError as error:
            raise KimiError(str(error), expected="owner/name and a revision", remedy="correct it") from None
        try:
            with self.audited(end=time.monotonic() + self.limits.listing):
                listing = self._list(name, asked, wanted)
        except (httpx.HTTPError, *STRANGE) as error:
            raise self.explain(error, name, asked) from None
        if not listing.files:
            what = f"{repo} has no {wanted}" if wanted else f"{repo} is empty"
            raise KimiError(f"{what} at revision {revision}", where=self.endpoint, remedy="check the revision")
        return listing

    def _list(self, repo: RepoName, revision: Revision, wanted: str | None) -> Listing:
        api = HfApi(self.endpoint, token=False)  # the audit adds the token
        commit = Commit(api.repo_info(repo, revision=revision, repo_type=self.kind).sha)
        if Commit.accepts(revision) and commit != revision:
            raise ValueError(f"commit {commit} for the commit {revision}")
        files: list[RemoteFile] = []
        folder = None if wanted is None else wanted.rpartition("/")[0] or None
        for entry in api.list_repo_tree(repo, folder, recursive=not wanted, revision=commit, repo_type=self.kind):
            if len(files) > MAX_FILES:
                break
            if isinstance(entry, RepoFile) and wanted in (None, entry.path):
                files.append(_remote_file(entry))
        return Listing(repo, revision, commit, tuple(files))

    def scrub(self, text: object) -> str:
        """Return text that may be shown: without the token, and without credentials or signatures in addresses."""
        shown = str(text)
        if self.token:
            shown = shown.replace(self.token, "***")
        shown = "".join(letter if letter.isprintable() else "?" for letter in shown)
        shown = re.sub(r"(https?://)[^/\s@]+@", r"\1***@", shown)
        return re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]*", r"\1?...", shown)

    def explain(self, error: Exception, repo: str, revision: str, path: str = "") -> KimiError:
        """Return the message for an error of huggingface_hub, httpx or the audit."""
        where = self.scrub(f"{self.endpoint}/{repo} at {revision}" + (f", {path}" if path else ""))
        if isinstance(error, HfHubHTTPError):
            return self._refusal(error.response.status_code, repo, revision, path, where)
        problem = f"{type(error).__name__}: {self.scrub(error)}"
        if isinstance(error, httpx.RequestError):
            return HubUnreachable(
                f"cannot reach the Hub: {problem}",
                where=self.scrub(self.endpoint),
                expected=f"{httpx.URL(self.endpoint).host} answers",
                remedy="check network, proxy (HTTPS_PROXY) and HF_ENDPOINT; --offline shows what is on this disk",
            )
        return KimiError(
            f"malformed answer from the Hub: {problem}",
            where=where,
            expected="a commit, and files with relative paths, sizes and digests",
            remedy="check HF_ENDPOINT, and whether a proxy or a login page answers in the Hub's place",
        )

    def _refusal(self, status: int, repo: str, revision: str, path: str, where: str) -> KimiError:
        """Return the message for an HTTP status."""
        if status in (401, 403):
            token = "the token was refused" if self.token else "no token is set"
            what = f"the Hub refuses access to {repo} (HTTP {status}): {token}"
            remedy = "check the name; accept the model's terms on its page; set HF_TOKEN or run `hf auth login`"
            return KimiError(what, where, "a public repository, or a token that may read it", remedy)
        if status == 404:
            what = f"the Hub has no {path + ' of ' + repo if path else f'{repo} at revision {revision}'} (HTTP 404)"
            return KimiError(what, where, remedy="check spelling and revision; a private repository needs HF_TOKEN")
        if status == 429:
            what = f"the Hub keeps limiting the request rate (HTTP 429) after {self.limits.attempts} attempts"
            return KimiError(what, where, remedy=f"{AGAIN}; a token raises the limit")
        return KimiError(f"the Hub answers HTTP {status}", where, remedy=AGAIN)


def _remote_file(entry: RepoFile) -> RemoteFile:
    """Parse one file of a listing. Its `lfs` part describes a large one."""
    digest = entry.lfs.sha256 if entry.lfs else entry.blob_id
    if not isinstance(digest, str):
        raise ValueError(f"{type(digest).__name__} instead of a digest")
    digest = Digest(digest.removeprefix("sha256:"))
    xet = None if entry.xet_hash is None else Digest(entry.xet_hash)
    return RemoteFile(RepoPath(entry.path), entry.size, digest, bool(entry.lfs), xet)

"""Ask the Hub what a repository holds, wait out its rate limits, and say its errors in plain words.

Metadata is asked for with our own client: huggingface_hub's has no timeout for listings and does not wait out a 429.

The endpoint and the token are read once, from huggingface_hub's own settings (`HF_ENDPOINT`, `HF_TOKEN`, the token
file). The token appears in no message: every text that comes from elsewhere passes through `Hub.scrub`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from ..errors import KimiError
from .model import Listing, RemoteFile

RETRY_STATUS = frozenset({408, 429, 500, 502, 503, 504})


class HubUnreachable(KimiError):
    """The Hub does not answer at all; asking about another repository is pointless."""


@dataclass(frozen=True)
class Backoff:
    """How often and after how long to try again: doubling from `first` to `cap` seconds."""

    attempts: int = 6
    first: float = 1.0
    cap: float = 60.0

    def delay(self, failures: int, headers: Mapping[str, str] | None = None) -> float:
        """Seconds to wait after the `failures`-th failure in a row; the server's wish goes before our schedule."""
        asked = requested_delay(headers or {})
        return min(self.first * 2 ** (failures - 1), self.cap) if asked is None else asked


def requested_delay(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks to wait (`Retry-After`, or `RateLimit` with nothing remaining), or None."""
    values = {name.lower(): value for name, value in headers.items()}
    if re.fullmatch(r"\d+", after := values.get("retry-after", "").strip()):
        return float(after)
    limit = re.search(r"r=0\b.*?t=(\d+)", values.get("ratelimit", "").replace(" ", ""))
    return float(limit.group(1)) if limit else None


@dataclass(frozen=True)
class Hub:
    """One Hub endpoint and the right to use it."""

    endpoint: str
    token: str | None = field(default=None, repr=False)
    backoff: Backoff = field(default_factory=Backoff)

    @classmethod
    def from_environment(cls) -> Hub:
        """The Hub that this machine's environment and token file name."""
        from huggingface_hub import constants, get_token

        return cls(constants.ENDPOINT, get_token())

    def url(self, repo: str, commit: str, path: str) -> str:
        """Where a file's bytes are asked for (the Hub redirects large files to its storage)."""
        return f"{self.endpoint}/{repo}/resolve/{commit}/{quote(path)}"

    def headers(self) -> dict[str, str]:
        """Request headers; httpx drops the authorization when a redirect leaves the host."""
        headers = {"accept-encoding": "identity"}
        return headers | ({"authorization": f"Bearer {self.token}"} if self.token else {})

    def client(self) -> httpx.Client:
        """A client for this Hub. A connection that stalls for 60 s is dropped, and the caller tries again."""
        return httpx.Client(headers=self.headers(), follow_redirects=True, timeout=httpx.Timeout(15.0, read=60.0))

    def listing(self, repo: str, revision: str) -> Listing:
        """Resolve `revision` to a commit and list its files with sizes and digests; KimiError when that fails."""
        _check_name(repo)
        base = f"{self.endpoint}/api/models/{repo}"
        with self.client() as client:
            try:
                commit = str(
                    self._get(client, f"{base}/revision/{quote(revision, safe='')}", repo, revision).json()["sha"]
                )
                files: list[RemoteFile] = []
                page = f"{base}/tree/{commit}?recursive=true"
                while page:
                    response = self._get(client, page, repo, revision)
                    files += [_remote_file(entry) for entry in response.json() if entry["type"] == "file"]
                    page = response.links.get("next", {}).get("url", "")
            except (ValueError, KeyError, TypeError) as error:
                raise KimiError(
                    f"the answer is not one of a Hub: {type(error).__name__}: {self.scrub(error)}",
                    where=self.scrub(base),
                    remedy="check HF_ENDPOINT and whether a proxy or a login page answers in its place",
                ) from None
        if not files:
            raise KimiError(f"{repo} is empty at revision {revision}", where=self.endpoint, remedy="check the revision")
        return Listing(repo, revision, commit, tuple(files))

    def scrub(self, text: object) -> str:
        """Text that may be shown: without the token, without credentials or signatures in addresses."""
        shown = str(text)
        if self.token:
            shown = shown.replace(self.token, "***")
        shown = re.sub(r"(https?://)[^/\s@]+@", r"\1***@", shown)
        return re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]*", r"\1?...", shown)

    def unreachable(self, error: Exception) -> HubUnreachable:
        """The message for a Hub that does not answer."""
        host = urlsplit(self.endpoint).hostname or self.endpoint
        return HubUnreachable(
            f"cannot reach the Hub: {type(error).__name__}: {self.scrub(error)}",
            where=self.scrub(self.endpoint),
            expected=f"{host} answers",
            remedy="check network, proxy (HTTPS_PROXY) and HF_ENDPOINT; `kimi fetch --offline` tells what is on disk",
        )

    def refusal(self, status: int, repo: str, revision: str, path: str = "") -> KimiError:
        """The message for an answer that no repetition will change."""
        where = self.scrub(f"{self.endpoint}/{repo} at {revision}" + (f", {path}" if path else ""))
        have = "the token was refused" if self.token else "no token is set"
        if status in (401, 403):
            return KimiError(
                f"the Hub refuses access to {repo} (HTTP {status}): {have}",
                where=where,
                expected="a public repository, or a token that may read it",
                remedy="check the name; accept the model's terms on its page; set HF_TOKEN or run `hf auth login`",
            )
        if status == 404:
            what = f"{path} of {repo}" if path else f"{repo} at revision {revision}"
            return KimiError(
                f"the Hub has no {what} (HTTP 404)",
                where=where,
                expected="an existing repository and revision",
                remedy="check spelling and revision; a private repository needs HF_TOKEN",
            )
        if status == 429:
            return KimiError(
                f"the Hub keeps limiting the request rate (HTTP 429) after {self.backoff.attempts} attempts",
                where=where,
                remedy="wait some minutes and repeat the command (it resumes); a token raises the limit",
            )
        return KimiError(f"the Hub answers HTTP {status}", where=where, remedy="repeat the command later; it resumes")

    def _get(self, client: httpx.Client, url: str, repo: str, revision: str) -> httpx.Response:
        """Ask for metadata, again after a passing failure."""
        for failures in range(1, self.backoff.attempts + 1):
            try:
                response = client.get(url)
            except httpx.TransportError as error:
                # A host that does not resolve or refuses mostly stays so: one more attempt, not a minute of silence.
                if failures >= min(2, self.backoff.attempts):
                    raise self.unreachable(error) from None
                time.sleep(self.backoff.delay(failures))
                continue
            if response.is_success:
                return response
            if response.status_code not in RETRY_STATUS or failures == self.backoff.attempts:
                break
            time.sleep(self.backoff.delay(failures, response.headers))
        raise self.refusal(response.status_code, repo, revision)


def _check_name(repo: str) -> None:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise KimiError(
            f"'{repo}' is not a repository name: {error}", expected="owner/name", remedy="correct the name"
        ) from None


def _remote_file(entry: dict[str, Any]) -> RemoteFile:
    """One file of the tree endpoint; a large one is described by its `lfs` part."""
    large = entry.get("lfs")
    digest = large["oid"] if large else entry["oid"]
    return RemoteFile(str(entry["path"]), int(entry["size"]), str(digest).removeprefix("sha256:"), bool(large))

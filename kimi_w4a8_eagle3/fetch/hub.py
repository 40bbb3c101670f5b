"""Ask the Hub what a repository holds, wait out its rate limits, and say its errors in plain words.

The endpoint and the token are read once, from huggingface_hub's own settings (`HF_ENDPOINT`, `HF_TOKEN`, the token
file). The token appears in no message: every text that comes from elsewhere passes through `Hub.scrub`.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote, urlsplit

import httpx

from ..errors import KimiError
from .model import Listing, RemoteFile

if TYPE_CHECKING:
    from huggingface_hub import HfApi

T = TypeVar("T")

RETRY_STATUS = frozenset({408, 429, 500, 502, 503, 504})
# Both libraries that huggingface_hub was built on: requests raises OSError subclasses, httpx its TransportError.
NETWORK_ERRORS = (httpx.TransportError, OSError)


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


class _Scrubbed(logging.Formatter):
    """Formats as `inner` does, traceback included, and hides what may not be shown."""

    def __init__(self, hub: Hub, inner: logging.Formatter) -> None:
        super().__init__()
        self.hub, self.inner = hub, inner

    def format(self, record: logging.LogRecord) -> str:
        return self.hub.scrub(self.inner.format(record))


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

    def api(self) -> HfApi:
        """huggingface_hub's client for this endpoint; `token=False` keeps it from looking for another token."""
        from huggingface_hub import HfApi

        return HfApi(endpoint=self.endpoint, token=self.token or False)

    def listing(self, repo: str, revision: str) -> Listing:
        """Resolve `revision` to a commit and list its files with sizes and digests; KimiError when that fails."""
        from huggingface_hub.hf_api import RepoFile

        api = self.api()
        commit = self._ask(repo, revision, lambda: api.model_info(repo, revision=revision, timeout=30).sha)
        entries = self._ask(repo, revision, lambda: list(api.list_repo_tree(repo, recursive=True, revision=commit)))
        files = tuple(
            RemoteFile(entry.path, entry.size, entry.lfs.sha256 if entry.lfs else entry.blob_id, entry.lfs is not None)
            for entry in entries
            if isinstance(entry, RepoFile)
        )
        if not commit or not files:
            raise KimiError(f"{repo} is empty at revision {revision}", where=self.endpoint, remedy="check the revision")
        return Listing(repo, revision, commit, files)

    def scrub(self, text: object) -> str:
        """Text that may be shown: without the token, without credentials or signatures in addresses."""
        shown = str(text)
        if self.token:
            shown = shown.replace(self.token, "***")
        shown = re.sub(r"(https?://)[^/\s@]+@", r"\1***@", shown)
        return re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]*", r"\1?...", shown)

    def guard_logs(self, *loggers: str) -> None:
        """Scrub what libraries log: with HF_DEBUG set, huggingface_hub logs every address it asks."""
        for name in loggers:
            for handler in logging.getLogger(name).handlers:
                handler.setFormatter(_Scrubbed(self, handler.formatter or logging.Formatter()))

    def unreachable(self, error: Exception) -> KimiError:
        """The message for a Hub that does not answer."""
        host = urlsplit(self.endpoint).hostname or self.endpoint
        return KimiError(
            f"cannot reach the Hub: {type(error).__name__}: {self.scrub(error)}",
            where=self.scrub(self.endpoint),
            expected=f"{host} answers",
            remedy="check network, proxy (HTTPS_PROXY) and HF_ENDPOINT; `--offline` works with what is on disk",
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

    def _ask(self, repo: str, revision: str, call: Callable[[], T]) -> T:
        """Run a metadata call, again after a passing failure, and translate what remains."""
        from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError

        for failures in range(1, self.backoff.attempts + 1):
            try:
                return call()
            except HFValidationError as error:
                raise KimiError(
                    f"'{repo}' is not a repository name: {error}", expected="owner/name", remedy="correct the name"
                ) from None
            except GatedRepoError:
                raise self.refusal(403, repo, revision) from None
            except HfHubHTTPError as error:
                status = error.response.status_code if error.response is not None else 0
                if status not in RETRY_STATUS or failures == self.backoff.attempts:
                    raise self.refusal(status, repo, revision) from None
                time.sleep(self.backoff.delay(failures, error.response.headers))
            except NETWORK_ERRORS as error:
                # A host that does not resolve or refuses mostly stays so: one more attempt, not a minute of silence.
                if failures >= min(2, self.backoff.attempts):
                    raise self.unreachable(error) from None
                time.sleep(self.backoff.delay(failures))
        raise AssertionError("unreachable")

"""Ask the Hub what a repository holds, wait out its rate limits, and say its errors in plain words.

Metadata is asked for with our own client: huggingface_hub's has no timeout for listings and does not wait out a 429.

The endpoint and the token are read once, from huggingface_hub's own settings (`HF_ENDPOINT`, `HF_TOKEN`, the token
file). The token appears in no message: every text that comes from elsewhere passes through `Hub.scrub`.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
from huggingface_hub import constants, get_token

from ..base.errors import KimiError
from ..base.tls import trusted
from .model import MAX_FILES, Listing, RemoteFile, human
from .names import Commit, Digest, RepoName, RepoPath, Revision

RETRY_STATUS = frozenset({408, 429, 500, 502, 503, 504})
REDIRECTS = 5


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


@dataclass(frozen=True)
class Limits:
    """How much one Hub may ask of us.

    `page` bytes of one answer about a repository and `pages` of them; `wait` seconds before one request and `listing`
    seconds for a whole listing; a whole header, and then at least `least` bytes, in `silence` seconds, or the
    connection counts as broken.
    """

    page: int = 8 << 20
    pages: int = 1000
    wait: float = 600.0
    listing: float = 1800.0
    silence: float = 60.0
    least: int = 64 << 10

    def steady(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        """The blocks of an answer; a ReadTimeout when they come so slowly that the answer would never end."""
        since, arrived = time.monotonic(), 0
        for block in blocks:
            yield block
            arrived += len(block)
            if arrived >= self.least:
                since, arrived = time.monotonic(), 0
            elif time.monotonic() - since > self.silence:
                raise httpx.ReadTimeout(f"fewer than {human(self.least)} in {self.silence:.0f} s")


class _Cord:
    """Cuts the connection of a request whose header takes too long: httpx bounds each read of it, not their number."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """httpcore's extension `trace`: a new connection, and the same one under TLS."""
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            self._socket = info["return_value"].get_extra_info("socket")

    @contextmanager
    def cut_after(self, seconds: float) -> Iterator[None]:
        """Cut it unless the block ends before."""
        timer = threading.Timer(seconds, self._cut)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _cut(self) -> None:
        if self._socket is not None:
            with suppress(OSError):
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # under TLS, too: the thread that reads wakes up


def requested_delay(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks to wait (`Retry-After`, or `RateLimit` with nothing remaining), or None."""
    values = {name.lower(): value for name, value in headers.items()}
    if re.fullmatch(r"\d+", after := values.get("retry-after", "").strip()):
        return float(after)
    # Cut, because a search in a long header takes time that grows with the square of its length.
    limit = re.search(r"r=0\b.*?t=(\d+)", values.get("ratelimit", "")[:200].replace(" ", ""))
    return float(limit.group(1)) if limit else None


@dataclass(frozen=True)
class Hub:
    """One Hub endpoint and the right to use it."""

    endpoint: str
    token: str | None = field(default=None, repr=False)
    backoff: Backoff = field(default_factory=Backoff)
    limits: Limits = field(default_factory=Limits)

    @classmethod
    def from_environment(cls) -> Hub:
        """The Hub that this machine's environment and token file name."""
        return cls(constants.ENDPOINT, get_token())

    def url(self, repo: str, commit: str, path: str) -> str:
        """Where a file's bytes are asked for (the Hub redirects large files to its storage)."""
        return f"{self.endpoint}/{repo}/resolve/{commit}/{quote(path)}"

    def client(self) -> httpx.Client:
        """A client for this Hub, without its token: `get` adds that. A connection that stalls is dropped, and the
        caller tries again. None is kept, because `get` knows those that it saw made."""
        timeout = httpx.Timeout(15.0, read=self.limits.silence)
        limits = httpx.Limits(max_keepalive_connections=0)
        headers = {"accept-encoding": "identity"}
        return httpx.Client(headers=headers, timeout=timeout, limits=limits, verify=trusted())

    @contextmanager
    def get(self, client: httpx.Client, url: str, headers: Mapping[str, str] | None = None) -> Iterator[httpx.Response]:
        """The answer to a request, through redirects; its body is still to be read.

        Only requests to the endpoint itself carry the token. The body of a redirect is not read: it may not end.
        """
        cord = _Cord()
        request = client.build_request("GET", url, headers=headers, extensions={"trace": cord.trace})
        for _ in range(REDIRECTS + 1):
            request.headers.pop("authorization", None)
            if self.token and self.is_home(request.url):
                request.headers["authorization"] = f"Bearer {self.token}"
            try:
                with cord.cut_after(self.limits.silence):
                    response = client.send(request, stream=True)
            except ValueError as error:  # httpx lets it out for some host names
                raise httpx.RemoteProtocolError(f"a redirect to no address: {error}") from None
            try:
                if response.next_request is None:
                    yield response
                    return
                request = response.next_request
            finally:
                response.close()
        raise httpx.RemoteProtocolError(f"more than {REDIRECTS} redirects")

    def is_home(self, url: httpx.URL) -> bool:
        """Whether an address is one of the endpoint's own: same scheme, host and port."""
        home = httpx.URL(self.endpoint)
        return (url.scheme, url.host, _port(url)) == (home.scheme, home.host, _port(home))

    def listing(self, repo: str, revision: str) -> Listing:
        """Resolve `revision` to a commit and list its files with sizes and digests; KimiError when that fails."""
        try:
            name, asked = RepoName(repo), Revision(revision)
        except ValueError as error:
            raise KimiError(str(error), expected="owner/name and a revision", remedy="correct it") from None
        try:
            with self.client() as client:
                commit, files = self._list(client, name, asked)
            if files:
                return Listing(name, asked, commit, tuple(files))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, httpx.InvalidURL) as error:
            raise KimiError(
                f"the answer is not one of a Hub: {type(error).__name__}: {self.scrub(error)}",
                where=self.scrub(f"{self.endpoint}/api/models/{name}"),
                expected="a commit, and files with relative paths, sizes and digests",
                remedy="do not use this Hub if it should know better; check HF_ENDPOINT and whether a proxy or a login "
                "page answers in its place",
            ) from None
        raise KimiError(f"{repo} is empty at revision {revision}", where=self.endpoint, remedy="check the revision")

    def _list(self, client: httpx.Client, repo: RepoName, revision: Revision) -> tuple[Commit, list[RemoteFile]]:
        """The commit and all pages of its files; ValueError and its like for an answer that is none."""
        end = time.monotonic() + self.limits.listing
        base = f"{self.endpoint}/api/models/{repo}"
        about, _ = self._ask(client, f"{base}/revision/{quote(revision, safe='')}", repo, revision, end)
        commit = Commit(about["sha"])
        if Commit.accepts(revision) and commit != revision:
            raise ValueError(f"commit {commit} for the commit {revision}")
        files: list[RemoteFile] = []
        page, seen = f"{base}/tree/{commit}?recursive=true", set[str]()
        while page:
            if not self.is_home(httpx.URL(page)):
                raise ValueError(f"the next page of the listing is at another host: {httpx.URL(page).host!r}")
            if page in seen or len(seen) >= self.limits.pages or len(files) > MAX_FILES:
                raise ValueError(f"the listing does not end after {len(seen)} pages and {len(files)} files")
            seen.add(page)
            entries, page = self._ask(client, page, repo, revision, end)
            files += [_remote_file(entry) for entry in entries if entry["type"] == "file"]
        return commit, files

    def wait(
        self, failures: int, headers: Mapping[str, str] | None, sleep: Callable[[float], Any], end: float | None = None
    ) -> Any:
        """Sleep before the next attempt and return what `sleep` does; KimiError when it would take too long."""
        delay = self.backoff.delay(failures, headers)
        if delay > self.limits.wait or (end is not None and time.monotonic() + delay > end):
            raise KimiError(
                f"the Hub asks to wait for {delay:.0f} s",
                where=self.scrub(self.endpoint),
                expected=f"at most {self.limits.wait:.0f} s, and {self.limits.listing:.0f} s for a listing",
                remedy="repeat the command later; it resumes",
            )
        return sleep(delay)

    def scrub(self, text: object) -> str:
        """Text that may be shown: without the token, without credentials or signatures in addresses."""
        shown = str(text)
        if self.token:
            shown = shown.replace(self.token, "***")
        shown = "".join(letter if letter.isprintable() else "?" for letter in shown)
        shown = re.sub(r"(https?://)[^/\s@]+@", r"\1***@", shown)
        return re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]*", r"\1?...", shown)

    def unreachable(self, error: Exception) -> HubUnreachable:
        """The message for a Hub that does not answer."""
        host = urlsplit(self.endpoint).hostname or self.endpoint
        return HubUnreachable(
            f"cannot reach the Hub: {type(error).__name__}: {self.scrub(error)}",
            where=self.scrub(self.endpoint),
            expected=f"{host} answers",
            remedy="check network, proxy (HTTPS_PROXY) and HF_ENDPOINT; `kimi-w4a8 fetch --offline` tells what is here",
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

    def _ask(self, client: httpx.Client, url: str, repo: RepoName, revision: Revision, end: float) -> tuple[Any, str]:
        """Ask for metadata, again after a passing failure: the answer, and the address of the next page or nothing."""
        for failures in range(1, self.backoff.attempts + 1):
            try:
                with self.get(client, url) as response:
                    if response.is_success:
                        return self._json(response, end), response.links.get("next", {}).get("url", "")
            except httpx.RequestError as error:
                # A host that does not resolve or refuses mostly stays so: one more attempt, not a minute of silence.
                if failures >= min(2, self.backoff.attempts):
                    raise self.unreachable(error) from None
                self.wait(failures, None, time.sleep, end)
                continue
            if response.status_code not in RETRY_STATUS or failures == self.backoff.attempts:
                break
            self.wait(failures, response.headers, time.sleep, end)
        raise self.refusal(response.status_code, repo, revision)

    def _json(self, response: httpx.Response, end: float) -> Any:
        """The parsed body, as far as its size and the time for it are bearable; else ValueError."""
        if response.headers.get("content-encoding", "identity") != "identity":
            raise ValueError("it is compressed, which was not asked for")
        body = bytearray()
        for block in self.limits.steady(response.iter_raw()):
            body += block
            if len(body) > self.limits.page:
                raise ValueError(f"it is longer than {human(self.limits.page)}")
            if time.monotonic() > end:
                raise ValueError(f"the listing takes longer than {self.limits.listing:.0f} s")
        return json.loads(body)


def _port(url: httpx.URL) -> int:
    return url.port or {"http": 80, "https": 443}.get(url.scheme, 0)


def _remote_file(entry: dict[str, Any]) -> RemoteFile:
    """One file of the tree endpoint; a large one is described by its `lfs` part."""
    large = entry.get("lfs")
    digest = large["oid"] if large else entry["oid"]
    if not isinstance(digest, str):
        raise ValueError(f"{type(digest).__name__} instead of a digest")
    return RemoteFile(RepoPath(entry["path"]), entry["size"], Digest(digest.removeprefix("sha256:")), bool(large))

"""Audit every request that huggingface_hub sends, and every answer before huggingface_hub reads it.

huggingface_hub trusts the Hub. It follows the next page of a listing to any host with the token, reads bodies of any
length, waits as long as a server asks, and logs signed addresses. The audit is the transport of its HTTP client.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from typing import Any

import httpx
from huggingface_hub import set_client_factory
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils._http import default_client_factory, parse_ratelimit_headers

from ..base.errors import KimiError
from ..base.tls import trusted
from .model import human

RETRY_STATUS = frozenset({408, 429, 500, 502, 503, 504})
# Marks a request for the bytes of a file. All others are for metadata, which huggingface_hub reads into memory.
FILE_HEADERS = {"accept": "application/octet-stream"}


class Stopped(Exception):
    """The fetch was asked to stop."""


@dataclass(frozen=True)
class Limits:
    """Retries, and limits of a Hub's answers. Sizes are bytes, times are seconds."""

    attempts: int = 6  # of one request
    first_pause: float = 1.0  # between attempts; it doubles
    longest_pause: float = 60.0
    asked_pause: float = 600.0  # that a server may ask for
    redirects: int = 5
    page: int = 8 << 20  # an answer with metadata
    pages: int = 1000
    listing: float = 1800.0  # for all pages, with their pauses
    silence: float = 60.0  # for a whole header, and then for each `least` bytes
    least: int = 64 << 10
    xet_schemes: tuple[str, ...] = ("https",)  # of addresses of Xet storage

    def pause(self, failures: int, headers: Mapping[str, str]) -> float:
        """Return the pause after the `failures`-th failure in a row. The server's own wish comes first."""
        if re.fullmatch(r"[0-9]+", after := headers.get("retry-after", "").strip()):
            return float(after)
        limit = parse_ratelimit_headers(headers)
        if limit is not None and limit.remaining == 0:
            return float(limit.reset_in_seconds)
        return min(self.first_pause * 2 ** (failures - 1), self.longest_pause)


@dataclass(frozen=True)
class Endpoint:
    """Address of a Hub, and the token for it."""

    endpoint: str
    token: str | None = field(default=None, repr=False)
    limits: Limits = field(default_factory=Limits)

    def owns(self, url: httpx.URL) -> bool:
        """Return True for the endpoint's own scheme, host and port. No other address gets the token."""
        return _origin(url) == _origin(httpx.URL(self.endpoint))

    @contextmanager
    def audited(self, stop: threading.Event | None = None, end: float = inf) -> Iterator[None]:
        """Send the requests of huggingface_hub through the audit, until `end` (monotonic) at the latest.

        Its log is off meanwhile: it shows signed addresses, and text that the server wrote.
        """

        def client() -> httpx.Client:
            transport = AuditTransport(self, stop or threading.Event(), end)
            return httpx.Client(transport=transport, follow_redirects=True, max_redirects=self.limits.redirects)

        verbosity = hub_logging.get_verbosity()
        hub_logging.set_verbosity(logging.CRITICAL + 1)
        set_client_factory(client)
        try:
            yield
        finally:
            set_client_factory(default_client_factory)
            hub_logging.set_verbosity(verbosity)


class AuditTransport(httpx.BaseTransport):
    """Transport of huggingface_hub's client. It waits out rate limits, and cuts answers that would never end."""

    def __init__(self, hub: Endpoint, stop: threading.Event, end: float) -> None:
        self._hub, self._limits, self._stop, self._end = hub, hub.limits, stop, end
        self._pages: set[str] = set()
        # A client reads the environment's proxies. It keeps no connection, because only a new one reports its socket.
        self._direct = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0), verify=trusted())

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request, again after a passing failure, and return the audited answer."""
        is_file = request.headers.get("accept") == FILE_HEADERS["accept"]
        for failures in range(1, self._limits.attempts + 1):
            if self._stop.is_set():
                raise Stopped
            try:
                response = self._send(request)
            except httpx.NetworkError as error:
                if is_file:  # huggingface_hub repeats the request after this error
                    raise httpx.RemoteProtocolError(str(error)) from None
                # A host that does not resolve or refuses mostly stays so: one more attempt, not a minute of silence.
                if failures >= min(2, self._limits.attempts):
                    raise
                self._pause(failures, {})
                continue
            if response.status_code not in RETRY_STATUS:
                return self._audit(request, response, is_file)
            response.close()
            if failures < self._limits.attempts:
                self._pause(failures, response.headers)
        status = response.status_code
        raise HfHubHTTPError(f"HTTP {status}", response=httpx.Response(status, request=request))

    def _send(self, request: httpx.Request) -> httpx.Response:
        """Send a request and wait for the header of its answer. A header that takes too long is cut."""
        headers = httpx.Headers(request.headers)
        headers["accept-encoding"] = "identity"
        headers.pop("authorization", None)
        if self._hub.token and self._hub.owns(request.url):
            headers["authorization"] = f"Bearer {self._hub.token}"
        sockets: list[socket.socket] = []

        def trace(event: str, info: Mapping[str, Any]) -> None:  # httpcore reports new connections, and TLS over them
            if event.endswith(("connect_tcp.complete", "start_tls.complete")):
                sockets.append(info["return_value"].get_extra_info("socket"))

        def cut() -> None:  # httpx limits each read of a header, not their number
            with suppress(OSError, IndexError):
                socket.socket.shutdown(sockets[-1], socket.SHUT_RDWR)

        timeout = httpx.Timeout(15.0, read=self._limits.silence).as_dict()
        extensions = {"timeout": timeout, "trace": trace}
        timer = threading.Timer(self._limits.silence, cut)
        timer.daemon = True
        timer.start()
        try:
            sent = httpx.Request(request.method, request.url, headers=headers, extensions=extensions)
            return self._direct.send(sent, stream=True)
        finally:
            timer.cancel()

    def _pause(self, failures: int, headers: Mapping[str, str]) -> None:
        seconds = self._limits.pause(failures, headers)
        if seconds > self._limits.asked_pause or time.monotonic() + seconds > self._end:
            raise KimiError(
                f"the Hub asks to wait for {seconds:.0f} s",
                where=httpx.URL(self._hub.endpoint).host,
                expected=f"at most {self._limits.asked_pause:.0f} s, and {self._limits.listing:.0f} s for a listing",
                remedy="repeat the command later; it resumes",
            )
        if self._stop.wait(seconds):
            raise Stopped

    def _audit(self, request: httpx.Request, response: httpx.Response, is_file: bool) -> httpx.Response:
        """Return the answer with a limited body. An answer that is no success loses its body, which may be endless."""
        try:
            if not response.is_success:
                response.close()
                if is_file and response.status_code == 403 and not self._hub.owns(request.url):
                    # huggingface_hub then asks the Hub for a new address.
                    raise httpx.RemoteProtocolError("HTTP 403: the signed address of the file expired")
                location = [(name, value) for name, value in response.headers.raw if name.lower() == b"location"]
                return httpx.Response(response.status_code, headers=location)
            if response.headers.get("content-encoding", "identity") != "identity":
                raise ValueError("it is compressed, which was not asked for")
            self._check_addresses(response)
            body = _Body(self._body(response, inf if is_file else self._limits.page), response)
            return httpx.Response(response.status_code, headers=response.headers, stream=body)
        except BaseException:
            response.close()
            raise

    def _check_addresses(self, response: httpx.Response) -> None:
        """Raise ValueError for a next page or a Xet storage that huggingface_hub must not follow."""
        storage = response.headers.get("x-xet-cas-url")
        if storage is not None and httpx.URL(storage).scheme not in self._limits.xet_schemes:
            raise ValueError(f"Xet storage at {storage!a:.80}")
        page = response.links.get("next", {}).get("url")
        if page is None:
            return
        if not self._hub.owns(url := httpx.URL(page)):
            raise ValueError(f"the next page of the listing is at another host: {url.host!r}")
        if page in self._pages or len(self._pages) >= self._limits.pages:
            raise ValueError(f"the listing does not end after {len(self._pages)} pages")
        self._pages.add(page)

    def _body(self, response: httpx.Response, most: float) -> Iterator[bytes]:
        """Yield at most `most` bytes. A body that is too slow is a ReadTimeout."""
        length, recent, since = 0, 0, time.monotonic()
        try:
            for block in response.iter_raw():
                if self._stop.is_set():
                    raise Stopped
                length, recent, now = length + len(block), recent + len(block), time.monotonic()
                if length > most:
                    raise ValueError(f"it is longer than {human(most)}")
                if now > self._end:
                    raise ValueError(f"the listing takes longer than {self._limits.listing:.0f} s")
                if recent >= self._limits.least:
                    recent, since = 0, now
                elif now - since > self._limits.silence:
                    least, silence = human(self._limits.least), self._limits.silence
                    raise httpx.ReadTimeout(f"fewer than {least} in {silence:.0f} s")
                yield block
        except httpx.NetworkError as error:  # huggingface_hub continues after this error
            raise httpx.RemoteProtocolError(str(error)) from None


@dataclass
class _Body(httpx.SyncByteStream):
    """Audited blocks. `close` closes the connection; a generator would do so only when it is collected."""

    blocks: Iterator[bytes]
    response: httpx.Response

    def __iter__(self) -> Iterator[bytes]:
        return self.blocks

    def close(self) -> None:
        self.response.close()


def _origin(url: httpx.URL) -> tuple[str, str, int]:
    return url.scheme, url.host, url.port or {"http": 80, "https": 443}.get(url.scheme, 0)

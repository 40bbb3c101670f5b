"""`kimi top`: reads an ops endpoint, or a bare SGLang server, again and again and shows what changed."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx
from rich.console import Console, RenderableType
from rich.live import Live

from ..base.errors import KimiError
from ..base.prometheus import Reading
from .overview import replica_rows, router_row
from .top_view import SPARKS, Overview

SPAN_S = 60.0  # latencies and acceptance are over at most this long
_TIMEOUT_S = 10.0


class Top:
    """What was read so far; `update` reads once more."""

    def __init__(self, base_url: str, http: httpx.Client) -> None:
        self.base_url = base_url
        self._http = http
        self._history: deque[Reading] = deque()
        self._throughput: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=SPARKS))
        self._notes: Sequence[str] = ()

    def update(self) -> None:
        """Read metrics and states. Raises KimiError when there is no exposition of an engine at the address."""
        reading = self._read()
        self._history.append(reading)
        while reading.at - self._history[0].at > SPAN_S and len(self._history) > 2:
            self._history.popleft()
        for row in replica_rows(self._history):
            if row.tokens_out is not None:
                self._throughput[row.name].append(row.tokens_out)
        self._notes = _reasons(self._status())

    def view(self, problem: str = "") -> RenderableType:
        """The screen; `problem` says why the last update failed."""
        seconds = self._history[-1].at - self._history[0].at
        title = f"{self.base_url}   {time.strftime('%H:%M:%S')}   latencies over the last {seconds:.0f} s"
        notes = [*self._notes, *([problem] if problem else [])]
        return Overview(title, replica_rows(self._history), router_row(self._history), self._throughput, notes)

    def _read(self) -> Reading:
        url = f"{self.base_url}/metrics"
        remedy = (
            "give the ops endpoint of `kimi serve` (port 9528 by default) or an SGLang server with --enable-metrics"
        )
        try:
            response = self._http.get(url)
            if response.status_code != 200:
                raise KimiError(f"no metrics: HTTP {response.status_code}", where=url, remedy=remedy)
            reading = Reading.parse(response.text, time.monotonic())
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise KimiError(f"no metrics: {str(error) or type(error).__name__}", where=url, remedy=remedy) from error
        except ValueError as error:
            raise KimiError("the answer is no Prometheus exposition", where=url, remedy=remedy) from error
        if not any(name.startswith(("kimi_", "sglang:")) for name in reading.samples):
            raise KimiError("no metrics of an engine in the answer", where=url, remedy=remedy)
        return reading

    def _status(self) -> Any:
        """The endpoint's /status; None on a bare SGLang server, which has none."""
        try:
            response = self._http.get(f"{self.base_url}/status")
            return response.json() if response.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            return None


def base_url_of(text: str) -> str:
    """`host:port`, or a URL with or without /metrics -> the base URL. Raises KimiError for anything else."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise KimiError(f"{text!r} is no address", expected="HOST:PORT or http://HOST:PORT")
    path = parts.path.rstrip("/").removesuffix("/metrics").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"


def run(url: str, interval_s: float, once: bool, console: Console | None = None) -> None:
    """Show until Ctrl-C, or, with `once`, one table of one interval. Plain tables where there is no terminal."""
    console = console or Console(highlight=False)
    with httpx.Client(timeout=_TIMEOUT_S, follow_redirects=True) as http:
        top = Top(base_url_of(url), http)
        top.update()
        time.sleep(interval_s)
        top.update()
        if once:
            console.print(top.view())
        elif console.is_terminal:
            with Live(top.view(), console=console, screen=True, auto_refresh=False) as live:
                while True:
                    time.sleep(interval_s)
                    live.update(_updated(top), refresh=True)
        else:
            console.print(top.view())
            while True:
                time.sleep(interval_s)
                console.print(_updated(top))


def _updated(top: Top) -> RenderableType:
    """A server that goes away while one looks at it is something to show, not an error."""
    try:
        top.update()
    except KimiError as error:
        return top.view(f"{time.strftime('%H:%M:%S')} {error.what}")
    return top.view()


def _reasons(status: Any) -> Sequence[str]:
    """Why replicas are not ready, in the supervisor's words."""
    if not isinstance(status, dict):
        return []
    replicas = [replica for replica in status.get("replicas", []) if not replica.get("ready")]
    return [f"replica {replica['name']}: {replica['phase']}, {replica['reason']}" for replica in replicas]

"""The ops endpoint of `serve` and `route`: a live page, /live, /ready, /metrics and /status beside the API's port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from ..base.errors import KimiError
from ..base.http import http_url, trusted
from ..base.prometheus import Exposition, Reading, merge, parse, render
from ..door.connections import BoundedProtocol
from ..door.settings import is_loopback
from ..engine.metrics import FAILED_REQUESTS, NAN_LOGITS, Acceptance
from ..machine.hardware import gpu_loads
from .fleet_metrics import fleet_families, seconds_since_progress
from .replica_state import FleetView, Phase, ReplicaState
from .window import Window

logger = logging.getLogger(__name__)

Families = tuple[Metric, ...]

TIMEOUT_S = 1.5  # in total; a busy engine answers in tens of milliseconds, a stopped one never
SAMPLE_INTERVAL_S = 5.0
PAGE = Path(__file__).with_name("live.html")
# The page is one file: it loads nothing from another host, and no other page may show it in a frame.
_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "frame-ancestors 'none'"
)
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 5.0
_WITHOUT_ENGINE = (Phase.STARTING, Phase.DOWN)  # what was read before is of an engine that is gone
# Phases by distance from serving. The nearest one is reported for a fleet without a ready replica.
_NEAREST_FIRST = (Phase.READY, Phase.CHECKING, Phase.STARTING, Phase.DRAINING, Phase.STALLED, Phase.DOWN)


class OpsServer:
    """Serves probes and metrics of a fleet from a thread of this process.

    It only reads the view; the supervisor sets the phases. The event loop's thread alone reads the view; other threads
    do the parsing and merging. Used as a context manager, or with start() and stop().

    scrape_timeout_s: time limit for a process before it is left out.
    """

    def __init__(
        self,
        host: str,
        port: int,
        view: FleetView,
        sample_interval_s: float = SAMPLE_INTERVAL_S,
        scrape_timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.host, self.port = host, port
        self._view = view
        self._windows: dict[str, Window] = {}  # by replica
        self._sample_interval_s, self._scrape_timeout_s = sample_interval_s, scrape_timeout_s
        routes = [
            Route("/", self._page),
            Route("/live", self._live),
            Route("/ready", self._ready),
            Route("/metrics", self._metrics),
            Route("/status", self._status),
        ]
        # A web page that rebinds its name to loopback still sends its own name.
        hosts = [host, "localhost", "127.0.0.1", "[::1]"] if is_loopback(host) else ["*"]
        own = Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)
        app = Starlette(routes=routes, middleware=[own, Middleware(GZipMiddleware)], lifespan=self._lifespan)
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            log_config=None,
            access_log=False,
            lifespan="on",
            proxy_headers=False,
            timeout_graceful_shutdown=2,
        )
        self._server = uvicorn.Server(config)
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None

    @property
    def base_url(self) -> str:
        return http_url(self.host, self.port)

    def acceptance(self, replica: str) -> Acceptance | None:
        """Return a replica's acceptance over the last minute; None when no verify step fell in it. Thread-safe."""
        window = self._windows.get(replica)
        return None if window is None else window.acceptance(time.monotonic())

    def start(self) -> None:
        """Start and return once the endpoint answers; raise KimiError when the port is taken."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            self._listener = listener = socket.create_server((self.host, self.port), family=family)
        except OSError as error:
            what = f"port {self.port} on {self.host} cannot be used: {error.strerror}"
            raise KimiError(what, where="--ops-port", remedy="choose another port, or 0 for none") from error
        # Outside the main thread uvicorn does not change the process's signal handlers.
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listener]}, name="ops-endpoint", daemon=True
        )
        self._thread.start()
        deadline = time.monotonic() + _START_TIMEOUT_S + self._scrape_timeout_s  # includes the first scrape
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                self.stop()
                raise KimiError("the ops endpoint did not start", where=self.base_url)
            time.sleep(0.01)

    def stop(self) -> None:
        """Stop answering and close the port; idempotent."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(timeout=_STOP_TIMEOUT_S)
        if self._listener is not None:
            self._listener.close()

    def __enter__(self) -> OpsServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        # Engines and router are near and need no proxy from the environment. `scrape` bounds the time.
        new = httpx.AsyncClient(trust_env=False, follow_redirects=True, timeout=None, verify=trusted())  # noqa: S113
        async with new as self._client:
            await self._sample()  # so that counting has begun when start() returns
            sampling = asyncio.create_task(self._keep_sampling())
            yield
            sampling.cancel()

    async def _keep_sampling(self) -> None:
        """Keep the windows filled, even if no scraper reads /metrics."""
        while True:
            await asyncio.sleep(self._sample_interval_s)
            await self._sample()

    async def _sample(self) -> None:
        """Add the engines' current counters to the windows."""
        replicas = self._view.replicas()
        try:
            await asyncio.to_thread(self._add, replicas, await self._scrape_all(replicas))
        except Exception:  # one malformed exposition must not end the sampling
            logger.exception("the metrics could not be sampled")

    def _add(self, replicas: Sequence[ReplicaState], expositions: Mapping[str, Families]) -> None:
        now = time.monotonic()
        for gone in self._windows.keys() - {replica.name for replica in replicas}:
            del self._windows[gone]
        for replica in replicas:
            if replica.name in expositions:
                reading = Reading.of(expositions[replica.name])
                self._windows.setdefault(replica.name, Window(replica.num_draft_tokens)).add(now, reading)
                replica.alarms = sum(reading.total(name) or 0.0 for name in (NAN_LOGITS, FAILED_REQUESTS))

    async def _scrape(self, url: str | None) -> Families | None:
        """Read the families at `url`; None without a URL, or when no valid exposition came in time."""
        if url is None:
            return None
        try:
            response = await asyncio.wait_for(self._client.get(url), self._scrape_timeout_s)
            response.raise_for_status()
            return await asyncio.to_thread(parse, response.text)  # takes tens of milliseconds; probes must not wait
        except (httpx.HTTPError, httpx.InvalidURL, asyncio.TimeoutError, ValueError):
            return None

    async def _scrape_all(self, replicas: Sequence[ReplicaState]) -> dict[str, Families]:
        """Read the engines by name; one that does not answer is left out and does not delay the others."""
        answers = await asyncio.gather(*(self._scrape(f"{replica.base_url}/metrics") for replica in replicas))
        return {one.name: found for one, found in zip(replicas, answers, strict=True) if found is not None}

    async def _page(self, _: Request) -> Response:
        return HTMLResponse(PAGE.read_text(), headers={"Content-Security-Policy": _PAGE_POLICY})

    async def _live(self, _: Request) -> Response:
        live, reason = self._view.live()
        return JSONResponse({"live": live, "reason": reason}, 200 if live else 503)

    async def _ready(self, _: Request) -> Response:
        replicas = self._view.replicas()
        ready = any(replica.ready for replica in replicas)
        return JSONResponse({"ready": ready, **_summary(replicas)}, 200 if ready else 503)

    async def _metrics(self, _: Request) -> Response:
        """Read and merge the expositions of replicas, router and supervisor now."""
        replicas = self._view.replicas()
        router = self._scrape(self._view.router_metrics_url)
        found, engines = await asyncio.gather(router, self._scrape_all(replicas))
        text = await asyncio.to_thread(self._merged, replicas, engines, found or ())
        return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    def _merged(self, replicas: Sequence[ReplicaState], engines: Mapping[str, Families], router: Families) -> bytes:
        recent = {replica.name: self.acceptance(replica.name) for replica in replicas}
        sources = [Exposition(tuple(fleet_families(self._view.recipe, replicas, recent, engines)))]
        sources += [Exposition(families, {"replica": name}) for name, families in engines.items()]
        return render(merge([*sources, Exposition(router)]))

    async def _status(self, _: Request) -> Response:
        replicas = self._view.replicas()
        live, reason = self._view.live()
        body = {
            "recipe": self._view.recipe,
            "live": live,
            "live_reason": reason,
            "ready": any(replica.ready for replica in replicas),
            "router_url": self._view.router_url,
            "replicas": [self._status_of(replica) for replica in replicas],
            "gpus": [asdict(gpu) for gpu in await asyncio.to_thread(gpu_loads)],
        }
        return JSONResponse(body)

    def _status_of(self, replica: ReplicaState) -> dict[str, Any]:
        recent, window = self.acceptance(replica.name), self._windows.get(replica.name)
        figures = window.figures(time.monotonic()) if window and replica.phase not in _WITHOUT_ENGINE else None
        canary = None if replica.canary is None else {**asdict(replica.canary), "at": replica.canary_at}
        return {
            "name": replica.name,
            "base_url": replica.base_url,
            "phase": replica.phase.value,
            "reason": replica.reason,
            "since": replica.since,
            "ready": replica.ready,
            "num_draft_tokens": replica.num_draft_tokens,
            "acceptance": None if recent is None else asdict(recent),
            "canary": canary,
            "seconds_since_progress": seconds_since_progress(replica),
            "progress_timeout_s": replica.progress_timeout_s,
            "stalls": replica.stalls,
            "restarts": dict(replica.restarts),
            "figures": None if figures is None else asdict(figures),
            "history": [{"time": at, "phase": phase.value, "reason": reason} for at, phase, reason in replica.history],
        }


def _summary(replicas: Sequence[ReplicaState]) -> dict[str, Any]:
    """Return the phase nearest to serving, and the reason of each replica that does not serve."""
    if not replicas:
        return {"phase": Phase.DOWN.value, "reason": "no replica is known"}
    phase = min((replica.phase for replica in replicas), key=_NEAREST_FIRST.index)
    waiting = [replica for replica in replicas if not replica.ready]
    if len(replicas) == 1:
        return {"phase": phase.value, "reason": "".join(replica.reason for replica in waiting)}
    reasons = (f"{replica.name}: {replica.phase.value}, {replica.reason}" for replica in waiting)
    return {"phase": phase.value, "reason": "; ".join(reasons)}

"""The ops endpoint of `serve`: a live page, /live, /ready, /metrics and /status beside the API's port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path

import httpx
import uvicorn
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from ..base.errors import KimiError
from ..base.http import bearer, http_url, is_loopback, trusted
from ..base.prometheus import Reading, merge, parse, render
from ..engine.metrics import FAILED_REQUESTS, NAN_LOGITS, Acceptance
from ..gateway.connections import ClientProtocol
from ..machine.hardware import gpu_loads
from .families import seconds_since_progress, supervisor_families
from .state import EngineState, Phase
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


class OpsServer:
    """Serves probes and metrics of an engine from a thread of this process.

    It reads the state, which the supervisor sets, and counts `alarms` there. Used as a context manager, or with start()
    and stop().

    gateway_metrics: folder of the gateway's counters. scrape_timeout_s: time limit for the engine's answer.
    """

    def __init__(
        self,
        host: str,
        port: int,
        state: EngineState,
        gateway_metrics: Path | None = None,
        sample_interval_s: float = SAMPLE_INTERVAL_S,
        scrape_timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.host, self.port = host, port
        self._state, self._gateway_metrics = state, gateway_metrics
        self._window = Window(state.num_draft_tokens)
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
            http=ClientProtocol,
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

    def acceptance(self) -> Acceptance | None:
        """Return the acceptance over the last minute; None when no verify step fell in it. Thread-safe."""
        return self._window.acceptance(time.monotonic())

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
        # The engine is near and needs no proxy from the environment. `_scrape` bounds the time.
        new = httpx.AsyncClient(trust_env=False, follow_redirects=True, timeout=None, verify=trusted())  # noqa: S113
        async with new as self._client:
            await self._sample()  # so that counting has begun when start() returns
            sampling = asyncio.create_task(self._keep_sampling())
            yield
            sampling.cancel()

    async def _keep_sampling(self) -> None:
        """Keep the window filled, even if no scraper reads /metrics."""
        while True:
            await asyncio.sleep(self._sample_interval_s)
            await self._sample()

    async def _sample(self) -> None:
        """Add the engine's current counters to the window."""
        try:
            found = await self._scrape()
            if found is not None:
                await asyncio.to_thread(self._add, found)
        except Exception:  # one malformed exposition must not end the sampling
            logger.exception("the metrics could not be sampled")

    def _add(self, families: Families) -> None:
        reading = Reading.of(families)
        self._window.add(time.monotonic(), reading)
        self._state.alarms = sum(reading.total(name) or 0.0 for name in (NAN_LOGITS, FAILED_REQUESTS))

    async def _scrape(self) -> Families | None:
        """Read the engine's families; None when no valid exposition came in time."""
        try:
            url, headers = f"{self._state.engine_url}/metrics", bearer(self._state.engine_secret)
            response = await asyncio.wait_for(self._client.get(url, headers=headers), self._scrape_timeout_s)
            response.raise_for_status()
            return await asyncio.to_thread(parse, response.text)  # takes tens of milliseconds; probes must not wait
        except (httpx.HTTPError, httpx.InvalidURL, asyncio.TimeoutError, ValueError):
            return None

    async def _page(self, _: Request) -> Response:
        return HTMLResponse(PAGE.read_text(), headers={"Content-Security-Policy": _PAGE_POLICY})

    async def _live(self, _: Request) -> Response:
        """Answer 200: a supervisor that gives its engine up ends with its process."""
        return JSONResponse({"live": True})

    async def _ready(self, _: Request) -> Response:
        state = self._state
        body = {"ready": state.ready, "phase": state.phase.value, "reason": "" if state.ready else state.reason}
        return JSONResponse(body, 200 if state.ready else 503)

    async def _metrics(self, _: Request) -> Response:
        """Read the engine's exposition now, and add the supervisor's families."""
        found = await self._scrape()
        text = await asyncio.to_thread(self._merged, found)
        return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    def _merged(self, engine: Families | None) -> bytes:
        ours = supervisor_families(self._state, self.acceptance(), engine is not None)
        return render(merge(merge(ours, self._of_gateway()), engine or ()))

    def _of_gateway(self) -> Families:
        """Return the counters of all workers of the gateway."""
        if self._gateway_metrics is None or not self._gateway_metrics.is_dir():
            return ()
        registry = CollectorRegistry()
        MultiProcessCollector(registry, str(self._gateway_metrics))
        return tuple(registry.collect())

    async def _status(self, _: Request) -> Response:
        state, recent = self._state, self.acceptance()
        figures = None if state.phase in _WITHOUT_ENGINE else self._window.figures(time.monotonic())
        canary = None if state.canary is None else {**asdict(state.canary), "at": state.canary_at}
        body = {
            "recipe": state.recipe,
            "base_url": state.base_url,
            "phase": state.phase.value,
            "reason": state.reason,
            "since": state.since,
            "ready": state.ready,
            "num_draft_tokens": state.num_draft_tokens,
            "acceptance": None if recent is None else asdict(recent),
            "canary": canary,
            "seconds_since_progress": seconds_since_progress(state),
            "progress_timeout_s": state.progress_timeout_s,
            "stalls": state.stalls,
            "restarts": dict(state.restarts),
            "figures": None if figures is None else asdict(figures),
            "history": [{"time": at, "phase": phase.value, "reason": reason} for at, phase, reason in state.history],
            "gpus": [asdict(gpu) for gpu in await asyncio.to_thread(gpu_loads)],
        }
        return JSONResponse(body)

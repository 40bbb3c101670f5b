"""The fuzzing itself: requests drawn in turn and sent side by side, a healthy client beside them, what is a fault.

A fault is an answer of 500 and above that is no overload (503), no answer within a minute, an engine that ended, a
refusal without a message, a healthy client that waited or read other tokens, or a connection from the engine to an
address that only a fuzzed request named.
"""

from __future__ import annotations

import itertools
import queue
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from hypothesis import strategies as st

from ..client import EngineClient
from ..errors import KimiError
from .draw import AHEAD, Drawn, contract_drawn, draw
from .requests import FuzzRequest
from .strategies import hostile_requests

ANSWER_WITHIN_S = 60.0
_OVERLOAD = 503
_SENDERS = 4
_QUESTIONS = tuple(
    f"Tom has {first} apples and buys {first + 4} more. How many apples has he?" for first in (3, 11, 20)
)
_REFUSED_WITHOUT_WORDS = 2  # bytes: "{}"


@dataclass(frozen=True)
class Fault:
    """What went wrong, after which request, and the command that repeats it."""

    what: str
    endpoint: str
    detail: str
    command: str


@dataclass
class Outcome:
    """Counts by endpoint and status (0: no HTTP answer), faults, and what the healthy client saw."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)
    healthy_s: list[float] = field(default_factory=list)

    @property
    def requests(self) -> int:
        """Requests sent."""
        return sum(self.statuses.values())

    def summary(self) -> dict[str, Any]:
        """Everything as JSON."""
        table: dict[str, dict[str, int]] = {}
        for (endpoint, status), count in sorted(self.statuses.items()):
            table.setdefault(endpoint, {})[str(status)] = count
        slowest = {"median_s": median(self.healthy_s), "max_s": max(self.healthy_s)} if self.healthy_s else {}
        return {
            "requests": self.requests,
            "by_endpoint_and_status": table,
            "healthy_client": {"answers": len(self.healthy_s), **slowest},
            "faults": [vars(fault) for fault in self.faults],
        }


class Fuzz:
    """Fuzzes the engine at `base_url`; `ended()` says whether its process is gone. Faults are written to `folder`."""

    def __init__(self, base_url: str, folder: Path, first_seed: int, ended: Callable[[], bool] = lambda: False) -> None:
        self.outcome = Outcome()
        self._url = base_url
        self._folder = folder
        self._seed = first_seed
        self._ended = ended
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._recent: deque[FuzzRequest] = deque(maxlen=2 * _SENDERS)

    def run(self, seconds: float, on_progress: Callable[[Outcome], None] = lambda _: None) -> Outcome:
        """Send for that long, or until the engine ends."""
        expected = self._answers()
        with httpx.Client(base_url=self._url, timeout=30.0) as client:
            openapi = client.get("/openapi.json").raise_for_status().json()
            model = str(client.get("/v1/models").raise_for_status().json()["data"][0]["id"])
        hostile: queue.Queue[FuzzRequest] = queue.Queue(AHEAD)
        with _trap(self._trapped) as trap_url, contract_drawn(openapi, self._seed) as (contract, is_drawing):
            strategy = hostile_requests(openapi, model, trap_url)
            work: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
                (self._be_healthy, (expected,)),
                (self._draw_hostile, (strategy, hostile)),
                *[(self._keep_sending, (drawn,)) for drawn in (hostile, contract) for _ in range(_SENDERS // 2)],
            ]
            threads = [threading.Thread(target=self._guarded, args=(each, *args)) for each, args in work]
            for thread in threads:
                thread.start()
            until = time.monotonic() + seconds
            while time.monotonic() < until and not self._stop.wait(0.5):
                on_progress(self.outcome)
                if not is_drawing():
                    self._fault("the fuzzer stopped", "", "the process that draws after the contract ended", [])
                    break
                if self._ended():
                    self._fault("the engine ended", "", "see server.log; these requests came last", list(self._recent))
                    break
            self._stop.set()
            for thread in threads:
                thread.join(timeout=ANSWER_WITHIN_S + 30)
        if not self._ended() and self._answers() != expected:
            self._fault("the healthy client reads other tokens than before", "/v1/chat/completions", "", [])
        return self.outcome

    def stop(self) -> None:
        """End `run` before its time."""
        self._stop.set()

    def _guarded(self, work: Callable[..., None], *args: Any) -> None:
        """An error of the fuzzer itself must not look like a clean run."""
        try:
            work(*args)
        except Exception as error:
            self._fault("the fuzzer stopped", work.__name__, f"{type(error).__name__}: {error}"[:500], [])
            self._stop.set()

    def _answers(self) -> list[tuple[int, ...]]:
        with EngineClient(self._url) as client:
            return [client.chat(question, 48).token_ids for question in _QUESTIONS]

    def _be_healthy(self, expected: list[tuple[int, ...]]) -> None:
        while not self._stop.is_set():
            for question, tokens in zip(_QUESTIONS, expected, strict=True):
                began = time.monotonic()
                try:
                    with EngineClient(self._url) as client:
                        found = client.chat(question, 48).token_ids
                except KimiError as error:
                    if not self._ended():
                        self._fault("the healthy client was refused", "/v1/chat/completions", str(error)[:500], [])
                    return
                took = time.monotonic() - began
                with self._lock:
                    self.outcome.healthy_s.append(took)
                if found != tokens:
                    detail = f"{found} instead of {tokens}"
                    self._fault("the healthy client read other tokens", "/v1/chat/completions", detail, [])
                if took > ANSWER_WITHIN_S:
                    self._fault(
                        "the healthy client waited", "/v1/chat/completions", f"{took:.0f} s", list(self._recent)
                    )
            self._stop.wait(0.2)

    def _draw_hostile(self, strategy: st.SearchStrategy[FuzzRequest], drawn: Drawn) -> None:
        for turn in itertools.count(self._seed):
            draw(strategy, turn, drawn, self._stop.is_set)
            if self._stop.is_set():
                return

    def _keep_sending(self, drawn: Drawn) -> None:
        while not self._stop.is_set():
            with suppress(queue.Empty):
                self._send(drawn.get(timeout=0.2))

    def _send(self, request: FuzzRequest) -> None:
        with self._lock:
            self._recent.append(request)
        endpoint = f"{request.method} {request.path.partition('?')[0]}" if request.raw is None else "broken HTTP"
        endpoint = _folded(endpoint)
        began = time.monotonic()
        try:
            status, text = self._raw(request.raw) if request.raw is not None else self._http(request)
        except httpx.TimeoutException:
            self._fault("no answer", endpoint, f"after {time.monotonic() - began:.0f} s", [request])
            status, text = 0, ""
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            if request.raw is None and not self._ended():
                self._fault("the connection broke", endpoint, f"{type(error).__name__}: {error}", [request])
            status, text = 0, ""
        with self._lock:
            self.outcome.statuses[endpoint, status] += 1
        if status >= 500 and status != _OVERLOAD:
            self._fault(f"HTTP {status}", endpoint, text[:500], [request])
        if (
            400 <= status < 500
            and request.raw is None
            and len(text) <= _REFUSED_WITHOUT_WORDS
            and request.method != "HEAD"
        ):
            self._fault(f"HTTP {status} without a message", endpoint, text, [request])

    def _http(self, request: FuzzRequest) -> tuple[int, str]:
        with (
            httpx.Client(base_url=self._url, timeout=ANSWER_WITHIN_S) as client,
            client.stream(request.method, request.path, content=request.body, headers=request.headers) as response,
        ):
            if request.leave:
                next(response.iter_raw(), b"")
                return response.status_code, "left"
            return response.status_code, response.read().decode(errors="replace")

    def _raw(self, raw: bytes) -> tuple[int, str]:
        host, port = self._url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=5.0) as connection:
            connection.sendall(raw)
            with suppress(TimeoutError):  # the server waits for the rest of the body: it should
                first = connection.recv(4096).decode(errors="replace")
                words = first.split(" ", 2)
                return (int(words[1]) if len(words) > 1 and words[1].isdigit() else 0), first
        return 0, ""

    def _trapped(self, path: str) -> None:
        self._fault("the engine fetched an address that a request named", path, "", list(self._recent))

    def _fault(self, what: str, endpoint: str, detail: str, requests: list[FuzzRequest]) -> None:
        with self._lock:
            number = len(self.outcome.faults)
            commands = [
                request.command(self._url, self._folder / f"fault-{number}-{index}.bin")
                for index, request in enumerate(requests)
            ]
            self.outcome.faults.append(Fault(what, endpoint, detail, "\n".join(commands)))


def _folded(endpoint: str) -> str:
    """One row for all ids."""
    for folder in ("/v1/models/", "/v1/responses/"):
        head, found, _ = endpoint.partition(folder)
        if found:
            return f"{head}{folder}ID"
    return endpoint


@contextmanager
def _trap(on_request: Callable[[str], None]) -> Iterator[str]:
    """A web server on loopback that nothing should ever ask; yields an address on it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            on_request(self.path)
            self.send_error(404)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, name="trap", daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/trap.png"
    finally:
        server.shutdown()
        server.server_close()

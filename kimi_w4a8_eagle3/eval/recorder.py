"""Proxy between lm-eval and the server that records every answer and never requests it again.

lm-eval keeps only the text of an answer. It does not report truncation at the token limit, it stops at the first
request that keeps failing, and its response cache cannot distinguish a failure from an answer. The recorder appends
each finished request to `requests.jsonl` with finish reason, usage and attempts. An interrupted run resumes because
repeated requests are answered from that file. The recorder retries where this can help. For a request that failed for
good lm-eval gets an empty text, so that the run continues and the failure is counted.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from ..base.errors import KimiError
from ..base.files import lines
from ..engine.client import bearer
from ..engine.reply import Reply, events

REQUESTS = "requests.jsonl"
ENDPOINTS = ("/v1/completions", "/v1/chat/completions")
_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
_FATAL = frozenset({401, 403, 404, 405})  # every other request would fail too


@dataclass(frozen=True)
class Patience:
    """Retry limits: attempts per request with doubling pauses, and how long the server may be unreachable."""

    attempts: int = 6
    first_pause_s: float = 1.0
    longest_pause_s: float = 30.0
    request_timeout_s: float = 3600.0
    server_away_s: float = 60.0

    def pause(self, attempt: int, retry_after: str | None = None) -> float:
        """Return the pause after attempt number `attempt` in seconds; Retry-After overrides it up to the limit."""
        wanted = self.first_pause_s * 2 ** (attempt - 1)
        if retry_after is not None and retry_after.strip().isdigit():
            wanted = float(retry_after)
        return min(wanted, self.longest_pause_s)


@dataclass(frozen=True)
class Answer:
    """One line of requests.jsonl. error, HTTP status: of a failed request, which a resumed run repeats."""

    key: str
    prompt_sha256: str
    text: str
    finish_reason: str | None
    completion_tokens: int | None
    attempts: int
    seconds: float
    error: str | None = None
    response: dict[str, Any] = field(default_factory=dict)
    status: int | None = None


@dataclass
class Recorder:
    """Proxy on a free loopback port, used as a context manager; lm-eval connects to `base_url`.

    api_key: key for `upstream`; without it, the key that lm-eval sends (OPENAI_API_KEY) is passed on.
    """

    upstream: str
    path: Path
    patience: Patience = field(default_factory=Patience)
    api_key: str | None = field(default=None, repr=False)
    answered: dict[str, Answer] = field(default_factory=dict)
    failed: dict[str, Answer] = field(default_factory=dict)
    reused: set[str] = field(default_factory=set)
    retries: int = 0
    fatal: str | None = None
    base_url: str = ""
    _away_since: float | None = None

    def __enter__(self) -> Recorder:
        _drop_cut_line(self.path)
        self.answered = {key: answer for key, answer in read_answers(self.path).items() if answer.error is None}
        self._earlier = set(self.answered)
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(timeout=10)

    @property
    def finished(self) -> int:
        """Number of requests of this run that were answered or failed for good."""
        return len(self.reused) + len(self.answered.keys() - self._earlier) + len(self.failed)

    @property
    def note(self) -> str:
        """Retries and failures so far, for the progress."""
        counts = ((self.retries, "retries"), (len(self.failed), "failed"))
        return ", ".join(f"{count} {what}" for count, what in counts if count)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=64 * 2**20)
        for endpoint in ENDPOINTS:
            app.router.add_post(endpoint, self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        timeout = aiohttp.ClientTimeout(total=self.patience.request_timeout_s, sock_connect=10)
        with self.path.open("a", encoding="utf-8") as self._file:
            async with aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=timeout, auto_decompress=True
            ) as self._http:
                await site.start()
                port = runner.addresses[0][1]
                self.base_url = f"http://127.0.0.1:{port}"
                self._ready.set()
                await self._closing.wait()
                await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        key = request_key(request.path, body)
        known = self.answered.get(key)
        if known is not None:
            if key in self._earlier:
                self.reused.add(key)
            return web.json_response(known.response)
        sent = request.headers.get("Authorization", "").removeprefix("Bearer").strip()
        headers = bearer(self.api_key or sent or None)
        answer = await self._ask(request.path, body, key, headers)
        if answer.error is not None and self.fatal is not None:
            return web.json_response({"error": self.fatal}, status=503)  # server failure: a resumed run asks again
        (self.failed if answer.error else self.answered)[key] = answer
        self._file.write(json.dumps(asdict(answer), ensure_ascii=False) + "\n")
        self._file.flush()
        return web.json_response(answer.response)

    async def _ask(self, path: str, body: dict[str, Any], key: str, headers: Mapping[str, str]) -> Answer:
        """Retry until there is an answer, the attempts are used up, or the server is gone."""
        began, attempt, error, status = time.monotonic(), 0, "", None
        while self.fatal is None:
            after, status = None, None
            attempt += 1
            try:
                async with self._http.post(self.upstream + path, json=body, headers=headers) as response:
                    self._away_since = None
                    content = await response.read()
                    if response.status == 200:
                        return _answer(path, key, body, _whole(body, content), attempt, time.monotonic() - began)
                    status = response.status
                    error = f"HTTP {status}: {content[:500].decode(errors='replace')}"
                    after = response.headers.get("Retry-After")
                    if status in _FATAL:
                        self.fatal = f"the server refuses every request: {error}"
                    if status not in _RETRIED:
                        break
            except aiohttp.ClientConnectorError as problem:
                error, attempt = str(problem), attempt - 1  # the server is not listening, so the attempt does not count
                self._note_absence(error)
            except (aiohttp.ClientError, asyncio.TimeoutError, ValueError, LookupError, TypeError) as problem:
                error = f"{type(problem).__name__}: {problem}"
            if attempt >= self.patience.attempts:
                break
            self.retries += 1
            await asyncio.sleep(self.patience.pause(max(1, attempt), after))
        return _failure(key, body, error, status, attempt, time.monotonic() - began)

    def _note_absence(self, error: str) -> None:
        """Abort the run once the server has been unreachable for too long."""
        now = time.monotonic()
        self._away_since = self._away_since or now
        if now - self._away_since > self.patience.server_away_s:
            self.fatal = f"no server has listened at {self.upstream} for {now - self._away_since:.0f} s: {error}"


def request_key(path: str, body: Mapping[str, Any]) -> str:
    """Hash everything that decides a request's answer: endpoint, model, prompt, limits, stops, seed."""
    return hashlib.sha256(json.dumps([path, body], sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def prompt_sha256(prompt: str | list[Any]) -> str:
    """Hash a prompt (text or chat messages) to join a record with lm-eval's sample."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read_answers(path: Path) -> dict[str, Answer]:
    """Return the records of a file by key; the last one wins, and a missing file gives none."""
    found: dict[str, Answer] = {}
    try:
        found_lines = lines(path)
    except FileNotFoundError:
        return found
    for number, line in enumerate(found_lines, start=1):
        try:
            answer = Answer(**json.loads(line))
        except (json.JSONDecodeError, TypeError) as error:
            raise KimiError(
                f"line {number} is not a recorded request: {error}",
                where=str(path),
                expected="the unchanged file that `kimi-w4a8 eval` wrote",
                remedy="start a new run",
            ) from error
        found[answer.key] = answer
    return found


def _drop_cut_line(path: Path) -> None:
    """Remove an incomplete last line left by a crash, so that the next record starts a new line."""
    if path.is_file():
        data = path.read_bytes()
        if not data.endswith(b"\n"):
            path.write_bytes(data[: data.rfind(b"\n") + 1])


def _whole(body: Mapping[str, Any], content: bytes) -> Any:
    """Return the server's answer; a streamed one is assembled into a whole response."""
    if not body.get("stream"):
        return json.loads(content)
    reply = Reply()
    for piece in events([content.decode()]):
        reply.add(piece)
    return reply.response()


def _answer(path: str, key: str, body: Mapping[str, Any], response: Any, attempts: int, seconds: float) -> Answer:
    choice = response["choices"][0]
    text = choice["message"]["content"] if path.endswith("chat/completions") else choice["text"]
    usage = response.get("usage") or {}
    return Answer(
        key=key,
        prompt_sha256=prompt_sha256(body.get("prompt") or body.get("messages") or ""),
        text=text or "",
        finish_reason=choice.get("finish_reason"),
        completion_tokens=usage.get("completion_tokens"),
        attempts=attempts,
        seconds=round(seconds, 3),
        response=response,
    )


def _failure(
    key: str, body: Mapping[str, Any], error: str, status: int | None, attempts: int, seconds: float
) -> Answer:
    """Make the record of a failed request; its empty text is what lm-eval gets."""
    empty = {"index": 0, "text": "", "message": {"role": "assistant", "content": ""}, "finish_reason": "error"}
    sha = prompt_sha256(body.get("prompt") or body.get("messages") or "")
    return Answer(key, sha, "", None, None, attempts, round(seconds, 3), error, {"choices": [empty]}, status)

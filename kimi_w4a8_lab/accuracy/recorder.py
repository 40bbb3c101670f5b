"""Client that appends every answer to `requests.jsonl` and never sends an answered request again.

lm-eval's own clients keep only the text of an answer. They do not report truncation at the token limit, they stop at
the first request that keeps failing, and their cache cannot distinguish a failure from an answer. The recorder keeps
finish reason, usage and attempts. It retries where this can help. A request that failed for good has an empty text, so
that the run continues and the failure is counted.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import httpx
from pydantic import TypeAdapter, ValidationError

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.http import trusted
from kimi_w4a8_eagle3.engine.client import bearer

from ..base.first_error import first_error
from .reply import Reply, events

JsonBody = dict[str, Any]
REQUESTS = "requests.jsonl"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
_FATAL = frozenset({401, 403, 404, 405})  # every other request would fail too
ShowAnswers = Callable[[int, str], object]  # finished requests and a note


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
    text: str
    finish_reason: str | None
    completion_tokens: int | None
    attempts: int
    seconds: float
    error: str | None = None
    response: dict[str, Any] = field(default_factory=dict)
    status: int | None = None


class Recorder:
    """Sends requests to `upstream` and keeps the answers in `path`, where an interrupted run finds them again.

    earlier: answers of an interrupted run. answers: of this run, failed ones among them. Both by request.
    """

    def __init__(self, upstream: str, path: Path, patience: Patience | None = None, api_key: str | None = None) -> None:
        self.upstream, self.path, self.patience = upstream, path, patience or Patience()
        self.earlier = {key: answer for key, answer in read_answers(path).items() if answer.error is None}
        self.answers: dict[str, Answer] = {}
        self.reused: set[str] = set()
        self.retries = 0
        self._headers = bearer(api_key)
        self._away_since: float | None = None

    @property
    def counts(self) -> dict[str, int]:
        """Requests asked in this run, answers reused from an interrupted one, and retries."""
        return {"asked": len(self.answers), "reused": len(self.reused), "retries": self.retries}

    @property
    def failed(self) -> list[Answer]:
        return [answer for answer in self.answers.values() if answer.error]

    def ask(
        self, endpoint: str, bodies: Sequence[Mapping[str, Any]], concurrency: int, show: ShowAnswers | None = None
    ) -> list[Answer]:
        """Return one answer for each body, in their order.

        show: takes the number of finished requests, with retries, refusals and failures as a note. Raises KimiError
        when the server refuses every request, answers something else, or stays away. The answers so far are kept.
        """

        async def ask_all(file: TextIO) -> list[Answer]:
            slots = asyncio.Semaphore(concurrency)
            timeout = httpx.Timeout(self.patience.request_timeout_s, connect=10.0)
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(
                base_url=self.upstream, timeout=timeout, limits=limits, headers=self._headers, verify=trusted()
            ) as http:

                async def ask_one(body: Mapping[str, Any]) -> Answer:
                    async with slots:
                        answer = await self._recorded(http, file, endpoint, body)
                    if show is not None:
                        refused = sum(400 <= (answer.status or 0) < 500 for answer in self.failed)  # some ask for it
                        failed = len(self.failed) - refused
                        counts = ((self.retries, "retries"), (refused, "refused"), (failed, "failed"))
                        note = ", ".join(f"{count} {what}" for count, what in counts if count)
                        show(len(self.answers) + len(self.reused), note)
                    return answer

                tasks = [asyncio.ensure_future(ask_one(body)) for body in bodies]
                try:
                    return await asyncio.gather(*tasks)
                finally:
                    for task in tasks:
                        task.cancel()

        with self.path.open("a", encoding="utf-8") as file:
            return asyncio.run(ask_all(file))

    async def _recorded(self, http: httpx.AsyncClient, file: TextIO, endpoint: str, body: Mapping[str, Any]) -> Answer:
        key = request_key(endpoint, body)
        if key in self.earlier:
            self.reused.add(key)
            return self.earlier[key]
        if key in self.answers and not self.answers[key].error:
            return self.answers[key]
        answer = self.answers[key] = await self._ask(http, endpoint, body, key)
        file.write(json.dumps(asdict(answer), ensure_ascii=False) + "\n")
        file.flush()
        return answer

    async def _ask(self, http: httpx.AsyncClient, endpoint: str, body: Mapping[str, Any], key: str) -> Answer:
        """Retry until there is an answer or the attempts are used up; raise KimiError if the server is gone."""
        began, attempt, status = time.monotonic(), 0, None
        while True:
            after, status = None, None
            attempt += 1
            try:
                response = await http.post(endpoint, json=body)
                self._away_since = None
                if response.status_code == 200:
                    whole = _whole(body, response)
                    return _answer(key, whole, attempt, time.monotonic() - began)
                status, after = response.status_code, response.headers.get("Retry-After")
                error = f"HTTP {status}: {response.text[:500]}"
                if status in _FATAL:
                    raise KimiError(f"the server refuses every request: {error}", where=self.upstream)
                if status not in _RETRIED:
                    break
            except httpx.ConnectError as problem:
                error, attempt = str(problem), attempt - 1  # the server is not listening, so the attempt does not count
                self._note_absence(error)
            except (httpx.HTTPError, ValueError, LookupError, TypeError) as problem:
                error = f"{type(problem).__name__}: {problem}"
            if attempt >= self.patience.attempts:
                break
            self.retries += 1
            await asyncio.sleep(self.patience.pause(max(1, attempt), after))
        return Answer(key, "", None, None, attempt, round(time.monotonic() - began, 3), error, status=status)

    def _note_absence(self, error: str) -> None:
        """Raise KimiError once the server has been unreachable for too long."""
        now = time.monotonic()
        self._away_since = self._away_since or now
        if now - self._away_since > self.patience.server_away_s:
            what = f"no server has listened for {now - self._away_since:.0f} s: {error}"
            raise KimiError(what, where=self.upstream)


def request_key(endpoint: str, body: Mapping[str, Any]) -> str:
    """Hash everything that decides a request's answer: endpoint, model, prompt, limits, stops, seed."""
    return hashlib.sha256(json.dumps([endpoint, body], sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def read_answers(path: Path) -> dict[str, Answer]:
    """Return the records of a file by key; the last one wins, and a missing file gives none.

    A last line that a crash cut is removed from the file, so that the next one is whole. Raises KimiError for an
    unreadable file and for a line that is no record.
    """
    adapter, found = TypeAdapter(Answer), list[Answer]()
    try:
        data = path.read_bytes() if path.is_file() else b""
        if data != (whole := data[: data.rfind(b"\n") + 1]):
            path.write_bytes(whole)
        for line in whole.splitlines():
            found.append(adapter.validate_json(line))
    except (OSError, ValidationError) as error:
        what = f"line {len(found) + 1}: {first_error(error)}" if isinstance(error, ValidationError) else str(error)
        raise KimiError(
            f"not the record of a run: {what}",
            where=str(path),
            expected="the unchanged file of a finished or interrupted run",
            remedy="finish that run with --resume, name another one, or start a new run",
        ) from error
    return {answer.key: answer for answer in found}


def _whole(body: Mapping[str, Any], response: httpx.Response) -> dict[str, Any]:
    """Return the server's answer; a streamed one is assembled into a whole response.

    Raises ValueError for a stream that was cut, and KimiError for a server of something else.
    """
    if body.get("stream"):
        reply = Reply()
        for piece in events([response.content.decode()]):
            reply.add(piece)
        return reply.response()
    found: Any = None
    with suppress(ValueError):
        found = response.json()
    if not isinstance(found, dict) or "choices" not in found:
        what = f"the server's answer is no completion: {response.text[:80]!r}"
        raise KimiError(what, str(response.url), "an answer in the form of OpenAI's API", "check the server's address")
    return found


def _answer(key: str, response: Any, attempts: int, seconds: float) -> Answer:
    choice = response["choices"][0]
    return Answer(
        key=key,
        text=(choice["message"]["content"] if "message" in choice else choice["text"]) or "",
        finish_reason=choice.get("finish_reason"),
        completion_tokens=(response.get("usage") or {}).get("completion_tokens"),
        attempts=attempts,
        seconds=round(seconds, 3),
        response=response,
    )

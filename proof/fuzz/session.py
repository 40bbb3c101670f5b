"""A fuzzing run: cases sent side by side, a healthy client beside them, and the limits that are judged.

A fault is an answer of 500 and above that is no overload (503), no answer within 90 s, a refusal without a
message, an answer of 2xx to what must be refused, an engine that ended, a healthy client that read other tokens or
waited, a connection from the engine to an address that only a request named, and memory or slots that do not return.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from threading import Lock
from typing import Any

import httpx
from hypothesis import Phase
from hypothesis.database import ExampleDatabase

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.engine.client import bearer
from kimi_w4a8_eagle3.fleet.serve import Terminated

from ..load import load_request
from ..load.load_questions import Question, known_questions
from .cases import TEMPLATES, Cases, template
from .corpus import corpus
from .requests import JSON, Case, HttpRequest, Wire, json_request
from .resources import Resources, settled
from .rounds import Found, Stopped, try_round
from .send import ANSWER_WITHIN_S, FuzzAnswer, FuzzSender, message
from .trap import trap

_OVERLOAD = 503
_SENDERS = 16
_ROUND = 200  # tries of a sender between two looks at the clock
_QUESTIONS = 6
_SUSPECTS = 5
# Beside 16 others on the same cores an answer takes many times as long as alone, and SGLang prefills all that waits
# before it decodes. Two of the longest possible prompts can be ahead. A stall takes longer still.
_TIMELY_FACTOR = 20.0
_AHEAD = 2

Key = tuple[str, str, str]  # a fault: what, group and name of the case


@dataclass(frozen=True)
class FuzzTarget:
    """An engine. pid: of its main process, where it is known. keys: where it has them."""

    base_url: str
    pid: int | None = None
    api_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    ended: Callable[[], bool] = lambda: False


@dataclass
class FuzzFault:
    """A fault, its smallest case, how often it came, and the commands that repeat it. size: bytes that they send."""

    what: str
    group: str
    name: str
    detail: str
    command: str
    size: int
    times: int = 1


@dataclass
class GroupRow:
    """A group's counts by status (0: no HTTP answer) and its slowest answer in seconds, with the case's name."""

    statuses: Counter[int] = field(default_factory=Counter)
    slowest: tuple[float, str] = (0.0, "")

    def between(self, low: int, high: int) -> int:
        """Count answers with a status in that range, ends included."""
        return sum(count for status, count in self.statuses.items() if low <= status <= high)


@dataclass
class FuzzOutcome:
    """Everything that a run saw."""

    rows: dict[str, GroupRow] = field(default_factory=dict)
    faults: dict[Key, FuzzFault] = field(default_factory=dict)
    healthy_s: list[float] = field(default_factory=list)
    idle_s: list[float] = field(default_factory=list)
    longest_prompt_s: float = 0.0
    before: Resources | None = None
    after: Resources | None = None

    @property
    def requests(self) -> int:
        """Requests sent."""
        return sum(row.statuses.total() for row in self.rows.values())

    def summary(self) -> dict[str, Any]:
        """Return everything as JSON."""
        return {
            "requests": self.requests,
            "groups": {
                name: {"statuses": dict(sorted(row.statuses.items())), "slowest_s": row.slowest}
                for name, row in self.rows.items()
            },
            "healthy_client": {
                "answers": len(self.healthy_s),
                "slowest_s": max(self.healthy_s, default=None),
                "slowest_idle_s": max(self.idle_s, default=None),
                "longest_prompt_s": self.longest_prompt_s,
            },
            "before": vars(self.before) if self.before else None,
            "after": vars(self.after) if self.after else None,
            "faults": [vars(fault) for fault in self.faults.values()],
        }


class Fuzz:
    """A run against one engine. timely: a healthy client that waits long is a fault. Faults go to `folder`.

    examples: what found a fault in an earlier run is sent first.
    """

    def __init__(
        self, target: FuzzTarget, folder: Path, seed: int, timely: bool = False, examples: ExampleDatabase | None = None
    ) -> None:
        self.outcome = FuzzOutcome()
        self._target, self._folder, self._seed, self._timely, self._examples = target, folder, seed, timely, examples
        self._owners: dict[Key, object] = {}  # the round that shrinks a fault: the others go on
        self._drawing = Lock()  # one sender draws at a time, so that 16 threads do not delay the event loop
        self._errors: list[Exception] = []
        self._signal = 0
        self._sending: dict[Future[list[Key]], Case] = {}
        self._cut: list[Case] = []  # whose connection broke, in that order
        # Whose clients left: their work may still run, while the requests that wait are its victims.
        self._left: deque[Case] = deque(maxlen=_SUSPECTS)
        self._more: Callable[[], bool] = lambda: False

    def run(
        self,
        requests: int | None = None,
        seconds: float | None = None,
        on_progress: Callable[[FuzzOutcome], None] = lambda _: None,
    ) -> FuzzOutcome:
        """Send about that many requests, or for that long. An engine that ends also ends the run."""
        questions = known_questions(self._target.base_url, _QUESTIONS, self._target.api_key)
        with trap(lambda path: self._fault("the engine fetched an address that a request named", None, path)) as url:
            cases, first = self._cases(url)
            until = time.monotonic() + (seconds if seconds is not None else float("inf"))
            most = requests if requests is not None else float("inf")
            self._more = lambda: self.outcome.requests < most and time.monotonic() < until
            try:
                asyncio.run(self._fuzz(cases, first, questions, on_progress))
            except asyncio.CancelledError:
                raise Terminated(self._signal) from None
        return self.outcome

    def _cases(self, forbidden_url: str) -> tuple[Cases, list[Case]]:
        target, keys = self._target, bearer(self._target.api_key)
        try:
            with httpx.Client(base_url=target.base_url, timeout=60.0, trust_env=False) as http:
                openapi = http.get("/openapi.json", headers=bearer(target.admin_key or target.api_key))
                models = http.get("/v1/models", headers=keys).raise_for_status().json()["data"]
                model = str(models[0]["id"])
                if self._timely:
                    body = {"model": model, "prompt": [8] * (int(models[0]["max_model_len"]) - 16), "max_tokens": 1}
                    began = time.monotonic()
                    http.post("/v1/completions", json=body, headers=keys).raise_for_status()
                    self.outcome.longest_prompt_s = time.monotonic() - began
                bodies = {path: json_request("POST", path, template(path, model)).body for path in TEMPLATES}
                sent = {path: http.post(path, content=body, headers=dict(JSON) | keys) for path, body in bodies.items()}
                closed = frozenset(path for path, answer in sent.items() if answer.status_code != 200)
                cases = Cases(openapi.raise_for_status().json(), model, forbidden_url, closed)
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise KimiError(f"the engine does not say what it serves: {error}", where=target.base_url) from error
        return cases, corpus(model, int(target.base_url.rpartition(":")[2]), target.api_key is not None)

    async def _fuzz(
        self, cases: Cases, first: list[Case], questions: list[Question], on_progress: Callable[[FuzzOutcome], None]
    ) -> None:
        target, loop, pool = self._target, asyncio.get_running_loop(), ThreadPoolExecutor(_SENDERS)
        # Hypothesis has a callback for garbage collections, in which the exception of a signal handler would be lost.
        for caught in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(caught, self._stop, caught, asyncio.current_task())
        async with (
            FuzzSender(target.base_url, target.api_key, _SENDERS) as sender,
            load_request.LoadClient(target.base_url, target.api_key, hang_s=ANSWER_WITHIN_S) as client,
        ):

            def send(case: Case, owner: object) -> None:
                if not self._more():
                    raise Stopped
                future = asyncio.run_coroutine_threadsafe(self._send(sender, case), loop)
                self._sending[future] = case
                self._drawing.release()
                try:
                    found = future.result()
                except CancelledError:
                    raise Stopped from None
                except Exception as error:  # of the fuzzer itself
                    self._errors.append(error)
                    raise Stopped from None
                finally:
                    self._drawing.acquire()
                    del self._sending[future]
                if any(self._owners.setdefault(key, owner) is owner for key in found):
                    raise Found(found)

            for number, question in enumerate(questions):
                await self._ask(client, question, number, self.outcome.idle_s)
            self.outcome.before = await settled(target.base_url, target.pid, None)
            left = iter(first)
            workers = [loop.run_in_executor(pool, self._work, number, cases, left, send) for number in range(_SENDERS)]
            healthy = asyncio.create_task(self._be_healthy(client, questions))
            try:
                while not all(worker.done() for worker in workers):
                    await asyncio.wait(workers, timeout=0.25)
                    on_progress(self.outcome)
                    if self._errors or healthy.done():
                        break
                    if target.ended():
                        detail = "see its log; these cases were not answered"
                        self._fault("the engine ended", None, detail, 2 * _SENDERS)
                        return
            finally:
                self._more = lambda: False
                healthy.cancel()
                for future in tuple(self._sending):
                    future.cancel()
                results = await asyncio.gather(*workers, healthy, return_exceptions=True)
                pool.shutdown()
            for error in (*self._errors, *results):  # must not look like a clean run
                if isinstance(error, Exception):
                    raise error
            for number, question in enumerate(questions):
                await self._ask(client, question, number, self.outcome.healthy_s)
        self.outcome.after = await settled(target.base_url, target.pid, self.outcome.before)
        for what in self.outcome.after.beyond(self.outcome.before):
            self._fault("did not return", None, what)

    def _stop(self, number: int, run: asyncio.Task[Any] | None) -> None:
        if run and not self._signal:
            self._signal = number
            run.cancel()

    def _work(self, worker: int, cases: Cases, first: Iterator[Case], send: Callable[..., None]) -> None:
        """Send what failed in an earlier run, the corpus, and rounds of drawn cases. Runs in a thread."""
        drawn = cases.strategy()
        with self._drawing:
            if worker == 0:
                try_round(drawn, partial(send, owner=object()), "", _ROUND, (Phase.reuse,), self._examples)
            with suppress(Stopped):
                for case in first:
                    with suppress(Found):
                        send(case, owner=None)
            for number in takewhile(lambda _: self._more(), itertools.count()):
                send_once, seed = partial(send, owner=object()), f"{self._seed}:{worker}:{number}"
                try_round(drawn, send_once, seed, _ROUND, (Phase.generate, Phase.shrink), self._examples)

    async def _send(self, sender: FuzzSender, case: Case) -> list[Key]:
        answers = await asyncio.gather(*(sender.send(what) for what in case.sends))
        found = [self._judge(case, what, answer) for what, answer in zip(case.sends, answers, strict=True)]
        return [key for key in found if key]

    def _judge(self, case: Case, what: HttpRequest | Wire, answer: FuzzAnswer) -> Key | None:
        row, status, text = self.outcome.rows.setdefault(case.group, GroupRow()), answer.status, answer.text
        row.statuses[status] += 1
        row.slowest = max(row.slowest, (answer.seconds, case.name))
        if answer.error:
            self._cut.append(case)
        elif status == 0 and isinstance(what, HttpRequest):
            self._left.append(case)
        if answer.error and not self._target.ended():
            return self._fault(answer.error.partition(":")[0], case, answer.error)
        if status >= 500 and status != _OVERLOAD:
            return self._fault(f"HTTP {status}", case, text[:500])
        if case.refused and 200 <= status < 300:
            return self._fault("answered what must be refused", case, f"HTTP {status}: {text[:300]}")
        if 400 <= status < 500 and isinstance(what, HttpRequest) and what.method != "HEAD" and not message(text):
            return self._fault(f"HTTP {status} without a message", case, text[:300])
        return None

    async def _be_healthy(self, client: load_request.LoadClient, questions: list[Question]) -> None:
        for number in itertools.count():
            await self._ask(client, questions[number % len(questions)], number, self.outcome.healthy_s)
            await asyncio.sleep(0.1)

    async def _ask(self, client: load_request.LoadClient, question: Question, number: int, times: list[float]) -> None:
        manner = (load_request.Manner.STREAM, load_request.Manner.PLAIN)[number % 2]
        record = await client.ask(question, manner, number)
        took = record.ended - record.began
        times.append(took)
        idle, longest = max(self.outcome.idle_s), self.outcome.longest_prompt_s
        if record.outcome is not load_request.ClientOutcome.OK and not self._target.ended():
            self._fault(f"the healthy client's answer: {record.outcome.value}", None, record.detail)
        elif self._timely and took > _TIMELY_FACTOR * idle + _AHEAD * longest:
            load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
            detail = f"{took:.1f} s; idle {idle:.1f} s, longest prompt {longest:.1f} s; {load}"
            self._fault("the healthy client waited", None, detail)

    def _fault(self, what: str, case: Case | None, detail: str, suspects: int = _SUSPECTS) -> Key:
        """Note a fault. Without a case, name those that wait longest for an answer, and those whose client left."""
        unanswered = [*(self._cut if self._target.ended() else ()), *tuple(self._sending.values())]
        cases = [case] if case else [*unanswered[:suspects], *self._left]
        key, size = (what, case.group if case else "", case.name if case else ""), sum(one.size for one in cases)
        known = self.outcome.faults.get(key)
        if known is not None:
            known.times += 1
            if case is None or size >= known.size:
                return key
        number = list(self.outcome.faults).index(key) if known else len(self.outcome.faults)
        commands = [
            send.command(self._target.base_url, self._folder / f"fault-{number}-{at}-{part}.bin")
            for at, one in enumerate(cases)
            for part, send in enumerate(dict.fromkeys(one.sends))
        ]
        times = known.times if known else 1
        self.outcome.faults[key] = FuzzFault(*key, detail, "\n".join(commands), size, times)
        return key

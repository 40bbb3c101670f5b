"""The fuzzing itself: cases sent side by side, a healthy client beside them, and what is a fault.

A fault is an answer of 500 and above that is no overload (503), no answer within 90 s, a refusal without a
message, an answer of 2xx to what must be refused, an engine that ended, a healthy client that read other tokens or
waited, a connection from the engine to an address that only a request named, and memory or slots that do not return.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.engine.client import bearer

from ..load import load_request
from ..load.load_questions import Question, known_questions
from .plan import TEMPLATES, Plan, probe
from .requests import Case, Request, Wire
from .resources import Resources, settled
from .send import ANSWER_WITHIN_S, Answer, Sender, message
from .trap import trap

_OVERLOAD = 503
_SENDERS = 16
_QUESTIONS = 6
_SUSPECTS = 5
# Beside 16 others on the same cores an answer takes many times as long as alone, and SGLang prefills all that waits
# before it decodes: two of the longest prompts that anybody may send can be ahead. What stalls takes longer still.
_TIMELY_FACTOR = 20.0
_AHEAD = 2


@dataclass(frozen=True)
class Target:
    """An engine. pid: of its main process, where it is known; keys: where it has them."""

    base_url: str
    pid: int | None = None
    api_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    ended: Callable[[], bool] = lambda: False

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.base_url.rpartition(":")[2])


@dataclass
class Fault:
    """What went wrong in which case, how often, and the commands that repeat its first time."""

    what: str
    group: str
    name: str
    index: int | None
    detail: str
    command: str
    times: int = 1


@dataclass
class Row:
    """A group's counts by status (0: no HTTP answer) and its slowest answer in seconds, with the case's name."""

    statuses: Counter[int] = field(default_factory=Counter)
    slowest: tuple[float, str] = (0.0, "")

    def between(self, low: int, high: int) -> int:
        """Answers with a status in that range, ends included."""
        return sum(count for status, count in self.statuses.items() if low <= status <= high)


@dataclass
class Outcome:
    """Everything that a run saw."""

    rows: dict[str, Row] = field(default_factory=dict)
    faults: dict[tuple[str, str, str], Fault] = field(default_factory=dict)
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
        """Everything as JSON."""
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
    """Fuzzes one engine from one seed. timely: a healthy client that waits long is a fault. Faults go to `folder`."""

    def __init__(self, target: Target, folder: Path, seed: int, timely: bool = False) -> None:
        self.outcome = Outcome()
        self._target = target
        self._folder = folder
        self._seed = seed
        self._timely = timely
        self._running: dict[int, Case] = {}
        self._cut: list[tuple[int, Case]] = []  # whose connection broke, in that order
        # Whose clients left: what they asked may still run, while those that wait are its victims.
        self._left: deque[tuple[int, Case]] = deque(maxlen=_SUSPECTS)
        self._stopped = False

    def run(
        self,
        requests: int | None = None,
        seconds: float | None = None,
        only: int | None = None,
        on_progress: Callable[[Outcome], None] = lambda _: None,
    ) -> Outcome:
        """Send that many requests, for that long, or the case of one index; less when the engine ends."""
        questions = known_questions(self._target.base_url, _QUESTIONS, self._target.api_key)
        with trap(lambda path: self._fault("the engine fetched an address that a request named", None, path)) as url:
            plan = self._plan(url)
            indexes = iter([only]) if only is not None else itertools.count()
            asyncio.run(self._fuzz(plan, questions, indexes, requests, seconds, on_progress))
        return self.outcome

    def stop(self) -> None:
        """End `run` before its time."""
        self._stopped = True

    def _plan(self, forbidden_url: str) -> Plan:
        keys = self._target.admin_key or self._target.api_key
        try:
            with httpx.Client(base_url=self._target.base_url, timeout=60.0, trust_env=False) as http:
                openapi = http.get("/openapi.json", headers=bearer(keys)).raise_for_status().json()
                models = http.get("/v1/models", headers=bearer(self._target.api_key)).raise_for_status().json()
                model = str(models["data"][0]["id"])
                if self._timely:
                    self.outcome.longest_prompt_s = self._longest(http, model, int(models["data"][0]["max_model_len"]))
                closed = frozenset(path for path in TEMPLATES if not self._opens(http, probe(path, model)))
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise KimiError(f"the engine does not say what it serves: {error}", where=self._target.base_url) from error
        return Plan(
            openapi, model, self._seed, forbidden_url, self._target.port, closed, self._target.api_key is not None
        )

    def _longest(self, http: httpx.Client, model: str, context: int) -> float:
        """Seconds that a prompt takes which fills the context, on an idle engine."""
        body = {"model": model, "prompt": [8] * (context - 16), "max_tokens": 1}
        began = time.monotonic()
        http.post("/v1/completions", json=body, headers=bearer(self._target.api_key)).raise_for_status()
        return time.monotonic() - began

    def _opens(self, http: httpx.Client, request: Request) -> bool:
        headers = [*request.headers, *bearer(self._target.api_key).items()]
        return http.post(request.path, content=request.body, headers=headers).status_code == 200

    async def _fuzz(
        self,
        plan: Plan,
        questions: list[Question],
        indexes: Iterator[int],
        requests: int | None,
        seconds: float | None,
        on_progress: Callable[[Outcome], None],
    ) -> None:
        until = time.monotonic() + (seconds if seconds is not None else float("inf"))

        def more() -> bool:
            enough = requests is not None and self.outcome.requests >= requests
            return not (self._stopped or enough or time.monotonic() > until)

        target = self._target
        async with (
            Sender(target.base_url, target.api_key, _SENDERS) as sender,
            load_request.LoadClient(target.base_url, target.api_key, hang_s=ANSWER_WITHIN_S) as client,
        ):
            for number, question in enumerate(questions):
                await self._ask(client, question, number, self.outcome.idle_s)
            self.outcome.before = await settled(target.base_url, target.pid, None)
            workers = [asyncio.create_task(self._work(plan, indexes, sender, more)) for _ in range(_SENDERS)]
            healthy = asyncio.create_task(self._be_healthy(client, questions))
            try:
                while not all(worker.done() for worker in workers):
                    await asyncio.wait(workers, timeout=0.25)
                    on_progress(self.outcome)
                    if target.ended():
                        self._fault(
                            "the engine ended", None, "see its log; these cases were not answered", 2 * _SENDERS
                        )
                        return
            finally:
                for task in (*workers, healthy):
                    task.cancel()
                results = await asyncio.gather(*workers, healthy, return_exceptions=True)
            for error in results:  # an error of the fuzzer itself must not look like a clean run
                if isinstance(error, Exception):
                    raise error
            for number, question in enumerate(questions):
                await self._ask(client, question, number, self.outcome.healthy_s)
        self.outcome.after = await settled(target.base_url, target.pid, self.outcome.before)
        for what in self.outcome.after.beyond(self.outcome.before):
            self._fault("did not return", None, what)

    async def _work(self, plan: Plan, indexes: Iterator[int], sender: Sender, more: Callable[[], bool]) -> None:
        for index in indexes:
            if not more():
                return
            case = plan.case(index)
            self._running[index] = case
            answers = await asyncio.gather(*(sender.send(each) for each in case.sends))
            del self._running[index]
            for what, answer in zip(case.sends, answers, strict=True):
                self._judge(index, case, what, answer)

    def _judge(self, index: int, case: Case, what: Request | Wire, answer: Answer) -> None:
        row = self.outcome.rows.setdefault(case.group, Row())
        row.statuses[answer.status] += 1
        row.slowest = max(row.slowest, (answer.seconds, f"{index}: {case.name}"))
        status = answer.status
        if answer.error:
            self._cut.append((index, case))
        elif status == 0 and isinstance(what, Request):
            self._left.append((index, case))
        if answer.error and not self._target.ended():
            self._fault(answer.error.partition(":")[0], (index, case), answer.error)
        elif status >= 500 and status != _OVERLOAD:
            self._fault(f"HTTP {status}", (index, case), answer.text[:500])
        elif case.refused and 200 <= status < 300:
            self._fault("answered what must be refused", (index, case), f"HTTP {status}: {answer.text[:300]}")
        elif 400 <= status < 500 and isinstance(what, Request) and what.method != "HEAD" and not message(answer.text):
            self._fault(f"HTTP {status} without a message", (index, case), answer.text[:300])

    async def _be_healthy(self, client: load_request.LoadClient, questions: list[Question]) -> None:
        for number in itertools.count():
            await self._ask(client, questions[number % len(questions)], number, self.outcome.healthy_s)
            await asyncio.sleep(0.1)

    async def _ask(self, client: load_request.LoadClient, question: Question, number: int, times: list[float]) -> None:
        manner = (load_request.Manner.STREAM, load_request.Manner.PLAIN)[number % 2]
        record = await client.ask(question, manner, number)
        took = record.ended - record.began
        times.append(took)
        if record.outcome is not load_request.ClientOutcome.OK and not self._target.ended():
            self._fault(f"the healthy client's answer: {record.outcome.value}", None, record.detail)
        elif self._timely and took > (
            _TIMELY_FACTOR * max(self.outcome.idle_s) + _AHEAD * self.outcome.longest_prompt_s
        ):
            load = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
            idle = f"idle {max(self.outcome.idle_s):.1f} s, longest prompt {self.outcome.longest_prompt_s:.1f} s"
            detail = f"{took:.1f} s; {idle}; load {load}"
            self._fault("the healthy client waited", None, detail)

    def _fault(self, what: str, where: tuple[int, Case] | None, detail: str, suspects: int = _SUSPECTS) -> None:
        """Note a fault; without a place, with what has been waiting longest for an answer, and whose client left."""
        unanswered = [*(self._cut if self._target.ended() else ()), *self._running.items()]
        cases = [where] if where else [*unanswered[:suspects], *self._left]
        group, name = (where[1].group, where[1].name) if where else ("", "")
        known = self.outcome.faults.get((what, group, name))
        if known is not None:
            known.times += 1
            return
        number = len(self.outcome.faults)
        commands = []
        for index, case in cases:
            for part, each in enumerate(dict.fromkeys(case.sends)):
                file = self._folder / f"fault-{number}-{index}-{part}.bin"
                commands.append(each.command(self._target.base_url, file))
            commands.append(f"python -m proof.fuzz --url {self._target.base_url} --seed {self._seed} --only {index}")
        at = where[0] if where else None
        self.outcome.faults[what, group, name] = Fault(what, group, name, at, detail, "\n".join(commands))

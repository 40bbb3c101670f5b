"""A fuzzing run: known attacks, then batches that hypothesis draws and shrinks, beside a healthy client.

A fault is an answer of 500 and above that is no overload (503), no answer within 90 s, a refusal without a message, an
answer of 2xx to what must be refused, a server that ended, a healthy client that read other tokens or nothing, a
connection to an address that only a request named, and memory or slots that do not return.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import psutil
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.database import ExampleDatabase
from hypothesis.errors import Flaky
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.door.settings import DoorSettings
from kimi_w4a8_eagle3.door.shares import BODIES
from kimi_w4a8_eagle3.engine.client import bearer
from kimi_w4a8_eagle3.sglang_plugin.upkeep.grammar_cache import MAX_COMPILER_BYTES

from ..load.asgi import served_app
from ..load.engine_loads import engine_loads
from ..load.load import ClientLoad
from ..load.load_questions import known_questions
from ..load.load_request import ClientOutcome
from .cases import TEMPLATES, Cases, template
from .corpus import corpus
from .requests import ANSWER_WITHIN_S, JSON, Case, Sender, json_request

# Without it a CPU engine keeps about 0.7 MiB for each of the last 1,024 sizes of matrices (docs/reliability.md), which
# hides what a request makes it keep.
NO_KERNEL_CACHE = "env.ONEDNN_MAX_CPU_ISA=AVX2"
SETTLE_S = 60.0
# What an engine keeps once: xgrammar's compiled grammars, and free memory that the C library does not give back. The
# largest part of that held bodies of one client. More is a fault.
_ALLOWED = {
    "memory": MAX_COMPILER_BYTES + BODIES // 2 * DoorSettings().max_body_bytes,
    "descriptors": 16,  # kept connections that were not yet found dead
}
_BATCH, _QUESTIONS = 8, 6


Attack = Callable[[Sequence[Case]], None]


class Found(Exception):
    """A batch that shows a fault."""


@dataclass(frozen=True)
class FuzzTarget:
    """A server. pid: of its main process, where it is known. keys: where it has them."""

    base_url: str
    pid: int | None = None
    api_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    ended: Callable[[], bool] = lambda: False


class Fuzz:
    """A run against one server. statuses: how many answers of each group had each status (0: no answer).

    database: of hypothesis; what found a fault in an earlier run is sent first.
    """

    def __init__(self, target: FuzzTarget, folder: Path, seed: int, database: ExampleDatabase | None = None) -> None:
        self.statuses = Counter[tuple[str, int]]()
        self._target, self._folder, self._seed, self._database = target, folder, seed, database
        self._fetched, self._looked = list[str](), 0
        self._failing: tuple[Sequence[Case], str] = ((), "")

    def run(self, batches: int) -> list[str]:
        """Send the corpus and up to `batches` drawn batches; return the faults, each with its commands."""
        target, faults = self._target, list[str]()
        questions = known_questions(target.base_url, _QUESTIONS, target.api_key)
        with _trap(self._fetched) as address, Sender(target.base_url, target.api_key) as sender:
            cases, known = self._cases(address)
            before = _settled(target, {})
            with ClientLoad(target.base_url, questions, 1, hang_s=ANSWER_WITHIN_S, api_key=target.api_key) as healthy:
                attack = partial(self._attack, sender, healthy)
                attempts: list[Callable[[], None]] = [partial(attack, [case]) for case in known]
                attempts.append(self._tries(cases, attack, batches))
                for number, attempt in enumerate(attempts):
                    faults += self._fault(number, attack, attempt)
                    if target.ended():
                        return faults
        after = _settled(target, before)
        return faults + [f"did not return: {what}" for what in _beyond(after, before)]

    def _attack(self, sender: Sender, healthy: ClientLoad, batch: Sequence[Case]) -> None:
        """Send a batch, unless the server has ended; raise Found for a fault, which `_failing` then has."""
        if self._target.ended():
            return
        answers, records = sender.send(batch), healthy.records[self._looked :]
        self._looked += len(records)
        self.statuses.update((case.group, status) for case, status, _ in answers)
        problems = [f"{case}: {fault}" for case, _, fault in answers if fault]
        problems += [f"it fetched an address that a request named: {path}" for path in self._fetched]
        problems += [
            f"the healthy client's answer: {record.outcome.value} {record.detail}"
            for record in records
            if record.outcome is not ClientOutcome.OK
        ]
        self._fetched.clear()
        if self._target.ended():
            problems = ["the server ended; see its log"]
        if problems:
            self._failing = batch, "; ".join(problems)
            raise Found

    def _tries(self, cases: Cases, attack: Attack, batches: int) -> Callable[[], None]:
        """Return a test of hypothesis, which passes batches to `attack` and shrinks one that fails."""

        @settings(  # above the seed, which else takes the database away
            max_examples=batches,
            database=self._database,
            phases=(Phase.reuse, Phase.generate, Phase.shrink),
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        @seeded(self._seed)
        @given(st.lists(cases.strategy(), min_size=1, max_size=_BATCH))
        def tries(batch: list[Case]) -> None:
            attack(batch)

        return tries

    def _fault(self, number: int, attack: Attack, attempt: Callable[[], None]) -> list[str]:
        """Run one attempt; return its fault with the commands that send the smallest failing batch again.

        A fault that does not come again is not shrunk: its batch is the one that was on its way.
        """
        try:
            attempt()
        except (Found, Flaky) as error:
            batch, problems = self._failing
            for case in batch if len(batch) > 1 else ():  # hypothesis leaves harmless ones beside the smallest
                with suppress(Found):
                    attack([case])
            batch, problems = self._failing
            sends = [what for case in batch for what in dict.fromkeys(case.sends)]
            files = [self._folder / f"fault-{number}-{at}.bin" for at in range(len(sends))]
            commands = [what.command(self._target.base_url, file) for what, file in zip(sends, files, strict=True)]
            once = "" if isinstance(error, Found) else "once: "
            return ["\n".join([f"{once}{problems}", *commands])]
        return []

    def _cases(self, forbidden_url: str) -> tuple[Cases, list[Case]]:
        target, keys = self._target, bearer(self._target.api_key)
        try:
            with httpx.Client(base_url=target.base_url, timeout=60.0, trust_env=False) as http:
                openapi = http.get("/openapi.json", headers=bearer(target.admin_key or target.api_key))
                model = str(http.get("/v1/models", headers=keys).raise_for_status().json()["data"][0]["id"])
                bodies = {path: json_request("POST", path, template(path, model)).body for path in TEMPLATES}
                sent = {path: http.post(path, content=body, headers=dict(JSON) | keys) for path, body in bodies.items()}
                closed = frozenset(path for path, answer in sent.items() if answer.status_code != 200)
                cases = Cases(openapi.raise_for_status().json(), model, forbidden_url, closed)
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise KimiError(f"the server does not say what it serves: {error}", where=target.base_url) from error
        return cases, corpus(model, int(target.base_url.rpartition(":")[2]), target.api_key is not None)


@contextmanager
def _trap(fetched: list[str]) -> Iterator[str]:
    """Yield an address of a web server on loopback that nothing should ever ask; note the paths that are asked."""

    def asked(request: Request) -> Response:
        fetched.append(request.url.path)
        return Response(status_code=404)

    with served_app(Starlette(routes=[Route("/{path:path}", asked)])) as url:
        yield f"{url}/trap.png"


def _settled(target: FuzzTarget, before: dict[str, int]) -> dict[str, int]:
    """Return requests, KV tokens, memory and descriptors once none exceeds `before`, or after a minute."""
    until = time.monotonic() + SETTLE_S
    while True:
        held: dict[str, int] = {**engine_loads(target.base_url), "memory": 0, "descriptors": 0}
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(target.pid) if target.pid else None
            for member in (process, *process.children(recursive=True)) if process else ():
                with suppress(psutil.NoSuchProcess):
                    held["memory"] += member.memory_info().rss
                    held["descriptors"] += member.num_fds()
        busy = held["num_running_reqs"] + held["num_waiting_reqs"]
        if not (busy or (before and _beyond(held, before))) or time.monotonic() > until:
            return held
        time.sleep(0.5)


def _beyond(held: dict[str, int], before: dict[str, int]) -> list[str]:
    """Return the resources that exceed `before` by more than is allowed, in words."""
    return [
        f"{name}: {held[name]}, before {before[name]}"
        for name in held
        if held[name] > before[name] + _ALLOWED.get(name, 0)
    ]

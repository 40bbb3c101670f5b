"""Simulation of a trace on engines: SGLang's scheduling with modelled step times, event by event.

`simulated_scheduler.py` says what of SGLang runs here. The step times, the loop of the scheduler and the router are
models. The router follows the published rules of sglang-router's cache-aware policy. Every verify step accepts the same
number of tokens.

Users start one after another, as in service. In lockstep, which has to be asked for, all start at once, so that equal
requests are prefilled and decoded together: no layout should be chosen by it.
"""

from __future__ import annotations

import heapq
import math
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count, takewhile
from typing import Union

from kimi_w4a8_eagle3.recipe.router_settings import ABSOLUTE_DIFFERENCE, RELATIVE_DIFFERENCE

from ..speed.trace import Trace, TraceSession, Turn
from ..with_sglang.simulated_scheduler import DelayedPrefills, SchedulerLimits, SimulatedRequest, SimulatedScheduler
from .layouts import EngineSettings
from .step_time import StepTime

RAMP = 0.1  # share of the horizon in which users start
MOST_STEPS = 32  # decode steps of one event; the context of a step is that of the first
AGAIN_S = 1.0  # a client whose request is refused sends the next one after this pause
THINK_CAP_S = 60.0  # longer pauses count as this, as in the tool that publishes AgentX's traces
ROUTER_STRIDE = 8  # units; a prefix of the router is compared every so many
CACHE_THRESHOLD = 0.3  # recipe/router_settings.py


@dataclass
class Served:
    """One request: its times in seconds, and its tokens."""

    turn: Turn
    session: _Running
    arrived: float
    prompt: array[int]
    answer: array[int]
    replica: _Engine | None = None
    first: float = 0.0
    end: float = 0.0
    cached: int = 0
    tokens: float = 0.0  # of the answer so far

    @property
    def ttft_s(self) -> float:
        return self.first - self.arrived

    @property
    def tpot_s(self) -> float:
        return (self.end - self.first) / max(self.turn.output_tokens - 1, 1)


@dataclass
class _Running:
    session: TraceSession
    cycle: int
    root: bool
    at: int = 0
    outside_s: float = 0.0


_Event = Union[_Running, "tuple[_Engine, int]"]


class _Units:
    """Numbers of the units of prompts; equal text has equal numbers."""

    def __init__(self, grain: int) -> None:
        self.grain = grain
        self._numbers: dict[object, int] = {}

    def of(self, segments: Sequence[tuple[str, int]], cycle: int) -> array[int]:
        """Return a number for every `grain` tokens of the segments, the last unit being shorter."""
        numbers, found, parts, size = self._numbers, array("q"), [], 0
        for segment in segments:
            content, tokens = segment
            if not size and tokens == self.grain:  # one block is one unit
                found.append(numbers.setdefault((cycle, content), len(numbers)))
                continue
            offset = 0
            while offset < tokens:
                took = min(self.grain - size, tokens - offset)
                parts.append((content, offset, took))
                size, offset = size + took, offset + took
                if size == self.grain:
                    found.append(numbers.setdefault((cycle, *parts), len(numbers)))
                    parts, size = [], 0
        if parts:
            found.append(numbers.setdefault((cycle, *parts), len(numbers)))
        return found


@dataclass
class _Engine:
    """Schedulers of one engine's ranks, and what they compute now: a prefill, or decode steps of `step_s` each."""

    settings: EngineSettings
    time: StepTime
    ranks: list[SimulatedScheduler]
    delayed: DelayedPrefills | None
    refuse: Callable[[Served, float], None]
    version: int = 0
    doing: str = ""
    began: float = 0.0
    step_s: float = 0.0
    steps: int = 0
    outstanding: int = 0
    last_step: float = 0.0  # when the last prefill or decode step that has ended began
    arriving: list[tuple[float, Served]] = field(default_factory=list)
    prefixes: set[int] = field(default_factory=set)

    def add(self, served: Served, now: float) -> None:
        """Give the engine a request, which its scheduler sees when it chooses a batch."""
        self.outstanding += 1
        self.arriving.append((now, served))

    def _queue(self, until: float) -> None:
        """Queue what has arrived on the rank with the fewest units, as SGLang's `total_tokens` does."""
        while self.arriving and self.arriving[0][0] <= until:
            served = self.arriving.pop(0)[1]
            rank = min(self.ranks, key=lambda scheduler: scheduler.units)
            if not rank.add("", served.prompt, served.answer, served):
                self.outstanding -= 1
                self.refuse(served, until)

    def interrupt(self, now: float) -> float | None:
        """Shorten the decode steps to those that the scheduler has chosen already; return their end if that is new."""
        if self.doing != "decode":
            return None
        steps = max(math.ceil((now - self.began) / self.step_s), 1) + self.settings.overlap
        if steps >= self.steps:
            return None
        self.steps, self.version = steps, self.version + 1
        return self.began + steps * self.step_s

    def complete(self, now: float) -> list[Served]:
        """Apply what ended now and return the finished requests."""
        done: list[Served] = []
        self.last_step = self.began + (max(self.steps - 1, 0) * self.step_s if self.doing == "decode" else 0.0)
        if self.doing == "prefill":
            for scheduler in self.ranks:
                for request in scheduler.finish_prefill():
                    served = request.tag
                    if not served.first:
                        most = served.turn.prompt_tokens - 1
                        served.first, served.cached = now, min(request.cached * self.settings.grain, most)
                    served.tokens = max(served.tokens, 1.0)
                    self._advance(scheduler, request, now, done)
        elif self.doing == "decode":
            for scheduler in self.ranks:
                scheduler.decoded(self.steps)
                for request in list(scheduler.running):
                    if request in scheduler.running:  # growth of another may have sent it back to the queue
                        request.tag.tokens += self.steps * self.settings.accept_length
                        self._advance(scheduler, request, now, done)
        self.doing = ""
        return done

    def _advance(
        self, scheduler: SimulatedScheduler, request: SimulatedRequest, now: float, done: list[Served]
    ) -> None:
        served = request.tag
        wanted, grain = served.turn.output_tokens, self.settings.grain
        if served.tokens >= wanted - 1e-9:
            scheduler.grow(request, len(served.answer))
            if request in scheduler.running:
                served.end = now
                scheduler.finish(request)
                self.outstanding -= 1
                done.append(served)
        else:
            scheduler.grow(request, int(served.tokens) // grain)

    def begin(self, now: float) -> float | None:
        """Start the next prefill or decode steps; return when they end, or None if there is nothing to do."""
        self._queue(self.last_step if self.settings.overlap else now)
        end = self._launch(now)
        if end is None and self.arriving:
            self._queue(now)
            end = self._launch(now)
        return end

    def _launch(self, now: float) -> float | None:
        batches = self.delayed.plan() if self.delayed else [scheduler.plan_prefill() for scheduler in self.ranks]
        grain = self.settings.grain
        self.began, self.version = now, self.version + 1
        if any(batches):
            work = [[_extend(request, grain) for request in batch] for batch in batches]
            self.doing = "prefill"
            return now + self.time.prefill(work)
        running = [
            (len(scheduler.running), sum(one.tag.turn.prompt_tokens + one.tag.tokens for one in scheduler.running))
            for scheduler in self.ranks
        ]
        if not any(requests for requests, _ in running):
            return None
        self.step_s = self.time.decode(running)
        left = min(one.tag.turn.output_tokens - one.tag.tokens for scheduler in self.ranks for one in scheduler.running)
        most = 1 if self.delayed and self.delayed.waiting else MOST_STEPS  # the delayer counts passes
        self.steps = max(1, min(most, math.ceil(left / self.settings.accept_length - 1e-9)))
        self.doing = "decode"
        return now + self.steps * self.step_s


def _extend(request: SimulatedRequest, grain: int) -> tuple[float, float]:
    """Return the new and the past tokens of a prefill; the last unit of a prompt may be shorter."""
    new, past = (units * grain for units in request.extend)
    whole = request.tag.turn.prompt_tokens + int(request.tag.tokens)
    return max(min(new, whole - past), 1), min(past, whole - 1)


def _choose(engines: Sequence[_Engine], prompt: array[int]) -> _Engine:
    """Choose as sglang-router's cache-aware policy: the fewest requests if unbalanced, else the longest prefix."""
    loads = [engine.outstanding for engine in engines]
    units = prompt[::ROUTER_STRIDE] if len(engines) > 1 else ()
    chains = list(accumulate(units, lambda chain, unit: hash((chain, unit)), initial=0))[1:]
    if max(loads) - min(loads) > ABSOLUTE_DIFFERENCE and max(loads) > RELATIVE_DIFFERENCE * min(loads):
        chosen = engines[loads.index(min(loads))]
    else:
        matched = [sum(1 for _ in takewhile(engine.prefixes.__contains__, chains)) for engine in engines]
        best = max(range(len(engines)), key=lambda at: matched[at])
        if matched[best] <= CACHE_THRESHOLD * len(chains):
            best = loads.index(min(loads))
        chosen = engines[best]
    chosen.prefixes.update(chains)
    return chosen


class Traffic:
    """One run of a trace on the engines of a layout.

    users: sessions that are active at once, started again with new text when all have ended; without it sessions start
    at their recorded times. Users start one after another during ramp_s, the first tenth of horizon_s; lockstep: at
    once. The run ends early, and horizon_s with it, when `enough` requests have ended that were sent after ramp_s.
    refused: requests for which the context, the pool or the queue has no room.
    """

    def __init__(
        self,
        trace: Trace,
        settings: EngineSettings,
        time: StepTime,
        users: int | None,
        horizon_s: float,
        lockstep: bool = False,
        enough: float = math.inf,
    ) -> None:
        grain = settings.grain
        limits = SchedulerLimits(
            settings.pool // grain,
            settings.chunk // grain,
            max(settings.chunk, 16384) // grain,
            settings.max_running,
            settings.max_queued,
            settings.prefix_cache,
            settings.eagle,
        )
        ranks = [[SimulatedScheduler(limits) for _ in range(settings.groups)] for _ in range(settings.engines)]
        self.engines = [
            _Engine(settings, time, schedulers, DelayedPrefills(schedulers) if settings.delayed else None, self._refuse)
            for schedulers in ranks
        ]
        self.settings, self.horizon_s, self.users = settings, horizon_s, users
        self.served: list[Served] = []
        self.refused: list[float] = []  # when each arrived
        self._left, self.ramp_s = enough, 0.0 if lockstep or users is None else RAMP * horizon_s
        self.unfinished: dict[int, Served] = {}
        self._units, self._unique, self._draw = _Units(grain), count(-1, -1), random.Random(settings.seed)
        self._next, self._events, self._order = 0, list[tuple[float, int, _Event]](), count()
        self._once = lockstep and trace.users is not None
        self._sessions, starts = list(trace.sessions), random.Random(settings.seed)
        if settings.seed:
            starts.shuffle(self._sessions)
        if users is None:
            for session, recorded in zip(self._sessions, trace.sessions, strict=True):
                self._start(session, recorded.start_s or 0.0, 0)
        else:
            for user in range(users):
                self._begin_next(self.ramp_s * (user + starts.random()) / users)

    def run(self) -> list[Served]:
        """Run until no event is left or the horizon is reached, and return the requests that ended."""
        while self._events:
            now, _, event = heapq.heappop(self._events)
            if now > self.horizon_s:
                break
            if self._left <= 0:
                self.horizon_s = now
                break
            if isinstance(event, _Running):
                self._send(event, now)
            else:
                engine, version = event
                if version == engine.version:
                    for served in engine.complete(now):
                        self._answered(served, now)
                    self._wake(engine, now)
        return self.served

    def _push(self, at: float, event: _Event) -> None:
        heapq.heappush(self._events, (at, next(self._order), event))

    def _begin_next(self, at: float) -> None:
        sessions = self._sessions
        if self._once and self._next >= len(sessions):
            return
        self._start(sessions[self._next % len(sessions)], at, self._next // len(sessions))
        self._next += 1

    def _start(self, session: TraceSession, at: float, cycle: int, root: bool = True) -> None:
        if session.turns:
            self._plan(at, _Running(session, cycle, root))
        for subagent in session.subagents:
            self._start(subagent, at + (subagent.start_s or 0.0), cycle, False)

    def _plan(self, now: float, running: _Running) -> None:
        """Let the session's next request reach a scheduler after the pause of its user."""
        think = min(running.session.turns[running.at].think_s, THINK_CAP_S)
        running.outside_s = self._draw.choice(self.settings.outside_s)
        self._push(now + think + running.outside_s, running)

    def _send(self, running: _Running, now: float) -> None:
        turn, settings = running.session.turns[running.at], self.settings
        if turn.prompt_tokens + turn.output_tokens > min(settings.context, settings.pool - 4 * settings.grain):
            self.refused.append(now)
            self._after(running, now + AGAIN_S)
            return
        prompt = self._units.of(turn.prompt, running.cycle)
        length = -(-turn.output_tokens // settings.grain)
        if turn.answer is None:
            answer = array("q", (next(self._unique) for _ in range(length)))
        else:
            answer = self._units.of([(turn.answer, turn.output_tokens)], running.cycle)
        served = Served(turn, running, now - running.outside_s, prompt, answer)
        self.unfinished[id(served)] = served
        engine = served.replica = _choose(self.engines, prompt)
        engine.add(served, now)
        if engine.doing == "":
            self._wake(engine, now)
        elif (end := engine.interrupt(now)) is not None:
            self._push(end, (engine, engine.version))

    def _wake(self, engine: _Engine, now: float) -> None:
        end = engine.begin(now)
        if end is not None:
            self._push(end, (engine, engine.version))

    def _answered(self, served: Served, now: float) -> None:
        self.served.append(self.unfinished.pop(id(served)))
        self._left -= served.arrived >= self.ramp_s
        self._after(served.session, now)

    def _refuse(self, served: Served, now: float) -> None:
        """Take back a request whose scheduler has no room in its queue."""
        del self.unfinished[id(served)]
        self.refused.append(served.arrived)
        self._after(served.session, now + AGAIN_S)

    def _after(self, running: _Running, now: float) -> None:
        running.at += 1
        if running.at < len(running.session.turns):
            self._plan(now, running)
        elif running.root and self.users is not None:
            self._begin_next(now)

"""Users that a fleet of nodes serves at an SLO while nodes fail and are restarted one after another.

The simulation of one node says how many requests of so many users meet the SLO. Here sessions start on the node with
the fewest users and stay there, as with the router's cache-aware policy. They move when their node goes, and their next
request has no prefix in the cache. No single request is simulated, so that an hour of 1,000 nodes takes seconds.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..recipe.router_settings import ABSOLUTE_DIFFERENCE, RELATIVE_DIFFERENCE
from .machine_model import Cluster
from .predict import calibrate
from .simulation import SimulatedRun, TrafficFigures, simulate
from .step_time import KimiStepTime
from .trace_plan import TracePlan, user_counts

SHARE = 0.999  # of the requests of a fleet that must meet the SLO
TOGETHER = 0.02  # share of the nodes that an update restarts at once, at least one
LEAST_HOURS, NODE_HOURS = 7 * 24.0, 50000.0
RESOLUTION = 0.005  # of the number of users
HOUR = 3600.0


@dataclass(frozen=True)
class FleetRates:
    """Failures of a node in 1,000 hours, rolling updates in a week, and seconds until a node serves again."""

    failures: float
    updates: float
    restart_s: float


@dataclass(frozen=True)
class NodeCurve:
    """One node by its users: requests a second, those of them that miss the SLO, and requests in flight.

    session_s: length of a session. cold: share of the requests that miss the SLO without a cached prefix.
    """

    rate: Sequence[float]
    slow: Sequence[float]
    in_flight: Sequence[float]
    session_s: float
    cold: float

    @classmethod
    def of(cls, found: Sequence[TrafficFigures], session_turns: float, cold: float) -> NodeCurve:
        """Interpolate the simulations of one layout with several numbers of users."""
        counts, every = [0, *(one.users or 0 for one in found)], range((found[-1].users or 0) + 1)
        rates = [0.0, *(one.requests_s for one in found)]
        bad = np.interp(every, counts[1:], [1 - one.good for one in found])
        rate, flight = (np.interp(every, counts, each) for each in (rates, [0.0, *(one.in_flight for one in found)]))
        return cls(list(rate), list(rate * bad), list(flight), session_turns * counts[1] / max(rates[1], 1e-9), cold)

    @property
    def most(self) -> int:
        """Most users of a node that were simulated."""
        return len(self.rate) - 1


@dataclass
class FleetFigures:
    """Requests of a simulated fleet, and those that miss the SLO because of the load, a cold cache, or a lost node."""

    nodes: int
    users: int
    requests: float = 0.0
    slow: float = 0.0
    cold: float = 0.0
    lost: float = 0.0

    @property
    def good(self) -> float:
        return 1 - (self.slow + self.cold + self.lost) / max(self.requests, 1e-9)


class FleetRun:
    """One run of a fleet. A user who has ended a session starts the next one."""

    def __init__(self, curve: NodeCurve, rates: FleetRates, nodes: int, users: int) -> None:
        self.curve, self.rates, self.figures = curve, rates, FleetFigures(nodes, users)
        self.loads = dict.fromkeys(range(nodes), 0)  # users of the nodes that serve
        self.place = [-1] * users  # node of every user; -1 while none serves
        self._least = [(0, node) for node in range(nodes)]  # heap; entries that are not in `loads` are out of date
        self._levels = Counter({0: nodes})  # nodes that serve, by their users
        self._rate = self._slow = 0.0  # requests a second, and those that wait too long
        self._events: list[tuple[float, str, int]] = []
        self._to_update: list[int] = []
        for user in range(users):
            self._start(user)

    def run(self, hours: float, seed: int = 0) -> FleetFigures:
        """Simulate; failures come at the same times for every number of users."""
        figures, end, now = self.figures, hours * HOUR, 0.0
        draw, ends = random.Random(seed), random.Random(seed + 1)
        self._repeat(draw, figures.nodes * self.rates.failures / 1000 / HOUR, end, "fail")
        self._repeat(draw, self.rates.updates / 7 / 24 / HOUR, end, "update")
        while now < end:
            # While all nodes have as many users, up to one, a session that ends changes nothing.
            uneven = max(self._levels, default=0) - min(self._levels, default=0) > 1
            session_end = now + ends.expovariate(figures.users / self.curve.session_s) if uneven else end
            at = min(end, session_end, self._events[0][0] if self._events else end)
            waiting = len(self.place) if not self.loads else 0
            figures.requests += (self._rate + waiting * self.curve.rate[1]) * (at - now)
            figures.slow += self._slow * (at - now)
            figures.lost += waiting * self.curve.rate[1] * (at - now)
            now = at
            if self._events and self._events[0][0] <= now:
                _, kind, node = heapq.heappop(self._events)
                self._happen(kind, node, now, draw)
            elif now < end:
                user = ends.randrange(figures.users)
                self._leave(user)
                self._start(user)
        return figures

    def _repeat(self, draw: random.Random, rate: float, end: float, kind: str) -> None:
        now = 0.0
        while rate and (now := now + draw.expovariate(rate)) < end:
            heapq.heappush(self._events, (now, kind, -1))

    def _happen(self, kind: str, node: int, now: float, draw: random.Random) -> None:
        if kind == "ready":
            self.loads[node] = 0
            self._levels[0] += 1
            heapq.heappush(self._least, (0, node))
            self._balance()
            self._update(now, 1)
        elif kind == "fail" and self.loads:
            victim = draw.choice(sorted(self.loads))
            self.figures.lost += self._at(self.curve.in_flight, victim)
            self._stop(victim, now)
        elif kind == "update" and not self._to_update:
            self._to_update = sorted(self.loads, reverse=True)
            self._update(now, max(1, int(TOGETHER * self.figures.nodes)))

    def _update(self, now: float, count: int) -> None:
        while count and self._to_update:
            node = self._to_update.pop()
            if node in self.loads:
                self._stop(node, now)
                count -= 1

    def _stop(self, node: int, now: float) -> None:
        """Take a node away. Its users go to other nodes, whose caches do not have their prefixes."""
        heapq.heappush(self._events, (now + self.rates.restart_s, "ready", node))
        users = [user for user, place in enumerate(self.place) if place == node]
        for user in users:
            self._leave(user)
        del self.loads[node]
        self._levels -= Counter((0,))
        for user in users:
            self._start(user)
        self.figures.cold += self.curve.cold * len(users) if self.loads else 0.0

    def _balance(self) -> None:
        """Place users without a node. Move others as the router does when nodes differ by many requests in flight."""
        for user in [user for user, place in enumerate(self.place) if place < 0]:
            self._start(user)
        while True:
            full, empty = (choose(self.loads, key=lambda node: self.loads[node]) for choose in (max, min))
            most, least = (self._at(self.curve.in_flight, node) for node in (full, empty))
            if most - least <= ABSOLUTE_DIFFERENCE or most <= RELATIVE_DIFFERENCE * least:
                return
            user = self.place.index(full)
            self._leave(user)
            self._start(user)
            self.figures.cold += self.curve.cold

    def _start(self, user: int) -> None:
        while self._least:
            load, node = self._least[0]
            if self.loads.get(node) == load:
                self.place[user] = node
                self._change(node, 1)
                return
            heapq.heappop(self._least)

    def _leave(self, user: int) -> None:
        if self.place[user] >= 0:
            self._change(self.place[user], -1)
            self.place[user] = -1

    def _change(self, node: int, by: int) -> None:
        rate, slow = self._at(self.curve.rate, node), self._at(self.curve.slow, node)
        self._levels -= Counter((self.loads[node],))
        self.loads[node] += by
        self._levels[self.loads[node]] += 1
        self._rate += self._at(self.curve.rate, node) - rate
        self._slow += self._at(self.curve.slow, node) - slow
        heapq.heappush(self._least, (self.loads[node], node))

    def _at(self, values: Sequence[float], node: int) -> float:
        return values[min(self.loads[node], self.curve.most)]


def capacity(curve: NodeCurve, rates: FleetRates, nodes: int, share: float) -> FleetFigures | None:
    """Return the fleet with the most users of whose requests `share` meet the SLO; None if one user is too many."""
    hours = max(NODE_HOURS / nodes, LEAST_HOURS)
    best, low, high = None, 0, nodes * curve.most
    while low < high:
        users = (low + high + 1) // 2
        found = FleetRun(curve, rates, nodes, users).run(hours)
        if found.good >= share:
            best, low = found, users
        else:
            high = users - 1
        if high - low <= RESOLUTION * high:
            break
    return best


@dataclass(frozen=True)
class FleetPlan:
    """Most users of a fleet: with the step times as modelled, with longer and shorter ones, and if no node fails.

    nearest: share of good requests with one user a node. simulated: requests of the shortest simulation of one node.
    """

    nodes: int
    recipe: str
    rates: FleetRates
    users: FleetFigures | None
    slow: FleetFigures | None
    fast: FleetFigures | None
    undisturbed: FleetFigures | None
    nearest: float
    simulated: int


def plan_fleet(plan: TracePlan, nodes: int, rates: FleetRates, show: Callable[[int, str], None]) -> FleetPlan | None:
    """Return the capacity of nodes with the plan's layout; None if no layout meets the SLO."""
    layout = plan.winner
    if layout is None:
        return None
    scales, counts = (1.0, 1 + plan.error, 1 - plan.error), user_counts(None)
    runs = [SimulatedRun(layout=layout, users=count, scale=scale) for scale in scales for count in counts]
    found = simulate(plan.job.model_copy(update={"runs": runs}), lambda done: show(done, "fleet"))
    step = KimiStepTime(calibrate(Cluster()), Cluster(tp=layout.tp, groups=layout.groups))
    turns = list(plan.trace.turns())
    late = [step.prefill([[(turn.prompt_tokens, 0)]]) > plan.job.slo.ttft_s for turn in turns]
    of_session, cold = len(turns) / len(plan.trace.sessions), sum(late) / len(late)
    curves = [NodeCurve.of([one for one in found if one.scale == scale], of_session, cold) for scale in scales]
    most = [capacity(curve, rates, nodes, SHARE) for curve in curves]
    calm = capacity(curves[0], FleetRates(0.0, 0.0, rates.restart_s), nodes, SHARE)
    nearest = FleetRun(curves[0], rates, nodes, nodes).run(LEAST_HOURS).good
    simulated = min(one.requests for one in found)
    return FleetPlan(nodes, layout.recipe, rates, most[0], most[1], most[2], calm, nearest, simulated)

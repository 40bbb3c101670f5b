"""`rank`: which layout of a node serves the traffic of a trace at an SLO, by simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kimi_w4a8_eagle3.base.errors import KimiError

from ..speed import published
from ..speed.statistics import Interval
from ..speed.trace import Trace
from ..speed.trace_readers import read_trace
from .layouts import Layout
from .machine_model import Cluster
from .predict import MAX_STEPS, calibrate, check, mean_error
from .simulation import SimulatedRun, SimulationJob, Slo, TrafficFigures, simulate

GOOD = 0.95  # share of the requests that must meet the SLO
USERS = (2, 4, 8, 16, 32, 64)
SEEDS = (1, 2)  # other orders of sessions and other starts of users
MODEL = "MODEL, not measured: SGLang's own scheduling and prefix cache, with modelled step times and router."


@dataclass(frozen=True)
class TracePlan:
    """Result of the simulations.

    curves: figures by layout and number of users. chosen: figures by layout at `users`, as modelled first, then with
    every change of `variations`. winner: None if no layout meets the SLO.
    """

    trace: Trace
    job: SimulationJob
    users: int | None
    error: float
    layouts: Sequence[Layout]
    curves: dict[str, list[TrafficFigures]]
    chosen: dict[str, list[TrafficFigures]]

    @property
    def winner(self) -> Layout | None:
        return choose_winner(self.layouts, self.chosen)

    @property
    def ranking(self) -> list[str]:
        """Layouts by the share of good requests that counts, then by goodput."""

        def rank(name: str) -> tuple[float, float]:
            middle = self.chosen[name][0]
            return min(middle.good, GOOD), middle.goodput_tok_s

        return sorted(self.chosen, key=rank, reverse=True)

    @property
    def verdict(self) -> str:
        where = "at the recorded times" if self.users is None else f"at {self.users} users"
        if self.winner is None:
            nearest = self.ranking[0]
            good = self.chosen[nearest][0].good
            return f"No layout meets {self.job.slo} {where}. The nearest is {nearest}, with {good:.0%} of the requests"
        if self.winner is self.layouts[0]:
            more, most = max((self.gain(name).value, name) for name in self.chosen)
            but = f": {most} serves {more:.2f}x, at least {self.gain(most).low:.2f}x" if more > 1 else ""
            return f"The default, recipe {self.winner.recipe}, stays {where}{but}"
        return f"{self.winner.name} serves this traffic best {where}"

    def gain(self, name: str) -> Interval:
        return gain(self.chosen[name], self.chosen[self.layouts[0].name])

    def reasons(self) -> list[str]:
        """Return what the winner gains over the default, and the command that serves it."""
        default = self.layouts[0]
        if self.winner is None or self.winner is default:
            return []
        first, second = (self.chosen[name][0] for name in (default.name, self.winner.name))
        return [
            f"goodput {second.goodput_tok_s:,.0f} instead of {first.goodput_tok_s:,.0f} tok/s; "
            f"TTFT p95 {second.ttft_p95_s:.2f} instead of {first.ttft_p95_s:.2f} s",
            self.winner.command,
        ]


def plan_trace(
    path: Path,
    slo: Slo,
    users: int | None,
    accept_length: float,
    horizon_s: float,
    show: Callable[[int, str], None],
    layouts: Sequence[Layout],
    lockstep: bool = False,
) -> TracePlan:
    """Simulate every layout under the trace; show is called with the finished simulations, and what runs.

    users: None takes the recorded times, or of a trace without them the most users that a layout serves at the SLO.
    """
    trace = read_trace(path)
    trace.require_lengths()
    longest = max(one.longest for one in layouts)
    if too_long(trace, longest) == sum(1 for _ in trace.turns()):
        raise KimiError(
            f"no request of the trace fits: each has more than {longest:,} tokens with its answer",
            where=str(path),
            expected="requests within the context length of the recipe",
        )
    error = mean_error(check(calibrate(Cluster()), Cluster()))
    runs = [
        SimulatedRun(layout=one, users=count, accept_length=accept_length, lockstep=lockstep)
        for one in layouts
        for count in user_counts(users)
    ]
    job = SimulationJob(trace=str(path.resolve()), slo=slo, horizon_s=horizon_s, runs=runs)
    swept = simulate(job, lambda done: show(done, "users"))
    if users is None and not trace.timed:
        users = max((f.users or 0 for f in swept if f.good >= GOOD), default=min(USERS))
    changes = [change | {"users": users} for change in variations(error, accept_length)]
    last = [runs[0].model_copy(update=change | {"layout": one}) for one in layouts for change in changes]
    ended = simulate(job.model_copy(update={"runs": last}), lambda done: show(len(runs) + done, "intervals"))
    curves, chosen = (
        {one.name: [figures for figures in found if figures.layout == one.name] for one in layouts}
        for found in (swept, ended)
    )
    return TracePlan(trace, job, users, error, layouts, curves, chosen)


def too_long(trace: Trace, longest: int) -> int:
    """Return the number of requests that have more tokens with their answers than `longest`."""
    return sum(turn.prompt_tokens + turn.output_tokens > longest for turn in trace.turns())


def variations(error: float, accept_length: float) -> list[dict[str, Any]]:
    """Return the changes behind the intervals: none, slower and faster steps, then accept lengths and seeds."""
    texts = [text.accept_length for text in published.accept_lengths() if text.kind == "real"]
    spread = float(np.std(texts) / np.mean(texts)) if accept_length > 1 else 0.0
    around = (max(accept_length * (1 - spread), 1.0), min(accept_length * (1 + spread), MAX_STEPS + 1.0))
    lengths = [{"accept_length": length} for length in around]
    return [{}, {"scale": 1 + error}, {"scale": 1 - error}, *lengths, *({"seed": seed} for seed in SEEDS)]


def user_counts(users: int | None) -> list[int]:
    """Return the numbers of users that every layout is simulated with."""
    return sorted({*USERS, *([users] if users else [])})


def gain(found: Sequence[TrafficFigures], default: Sequence[TrafficFigures]) -> Interval:
    """Return a layout's goodput over the default's.

    The errors of two layouts' step times may have opposite signs, all else is common.
    """
    opposite = [default[0], default[2], default[1], *default[3:]]
    pairs = zip(found, opposite, strict=True)
    ratios = [one.goodput_tok_s / max(other.goodput_tok_s, 1e-9) for one, other in pairs]
    return Interval(ratios[0], min(ratios), max(ratios))


def choose_winner(layouts: Sequence[Layout], chosen: dict[str, list[TrafficFigures]]) -> Layout | None:
    """Return the best layout that meets the SLO, or the default if the best one's gain may be none.

    The default meets the SLO here if it does so with any of the variations.
    """
    able = [one for one in layouts if chosen[one.name][0].good >= GOOD]
    if not able:
        return None
    best, default = max(able, key=lambda one: chosen[one.name][0].goodput_tok_s), layouts[0]
    in_reach = any(one.good >= GOOD for one in chosen[default.name])
    least = gain(chosen[best.name], chosen[default.name]).low or 0.0
    return default if in_reach and least <= 1 else best

"""`rank`: which layout of a node serves the traffic of a trace at an SLO, by simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..speed.trace import Trace
from ..speed.trace_readers import read_trace
from .layouts import Layout
from .machine_model import Cluster
from .predict import calibrate, check, mean_error
from .simulation import SimulatedRun, SimulationJob, Slo, TrafficFigures, simulate

GOOD = 0.95  # share of the requests that must meet the SLO
USERS = (2, 4, 8, 16, 32, 64)
MODEL = "MODEL, not measured: SGLang's own scheduling and prefix cache, with modelled step times, router and host KV."


@dataclass(frozen=True)
class TracePlan:
    """Result of the simulations.

    curves: figures by layout and number of users. chosen: figures by layout at `users`, with the times as modelled,
    and longer and shorter by the model's error. winner: None if no layout meets the SLO.
    """

    trace: Trace
    job: SimulationJob
    users: int | None
    error: float
    layouts: Sequence[Layout]
    curves: dict[str, list[TrafficFigures]]
    chosen: dict[str, list[TrafficFigures]]
    winner: Layout | None
    default_stays: bool

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
        if self.default_stays:
            return f"The default, recipe {self.winner.recipe}, stays {where}"
        return f"Recipe {self.winner.recipe} ({self.winner.name}) serves this traffic best {where}"

    def reasons(self) -> list[str]:
        """Return each flag of the winner that differs from the default, and why."""
        default = self.layouts[0]
        if self.winner is None or self.winner.name == default.name:
            return []
        first, second = (self.chosen[name][0] for name in (default.name, self.winner.name))
        gain = f"goodput {second.goodput_tok_s:,.0f} instead of {first.goodput_tok_s:,.0f} tok/s"
        late = f"TTFT p95 {second.ttft_p95_s:.2f} instead of {first.ttft_p95_s:.2f} s"
        flags = [f"tp-size={self.winner.tp}", f"options.replicas={self.winner.engines}"]
        flags += [f"dp-size={self.winner.groups}"] if self.winner.groups > 1 else []
        return [
            f"{', '.join(flags)}: {gain}; {late}",
            f"the other settings are those of the recipe {self.winner.recipe}",
        ]


def plan_trace(
    path: Path,
    slo: Slo,
    users: int | None,
    accept_length: float,
    horizon_s: float,
    show: Callable[[int, str], None],
    layouts: Sequence[Layout],
) -> TracePlan:
    """Simulate every layout under the trace; show is called with the finished simulations, and what runs.

    users: None takes the recorded times, or of a trace without them the most users that a layout serves at the SLO.
    """
    trace = read_trace(path)
    trace.require_lengths()
    error = mean_error(check(calibrate(Cluster()), Cluster()))
    counts = user_counts(users)
    runs = [SimulatedRun(layout=one, users=count) for one in layouts for count in counts]
    job = SimulationJob(trace=str(path.resolve()), slo=slo, horizon_s=horizon_s, accept_length=accept_length, runs=runs)
    swept = simulate(job, lambda done: show(done, "users"))
    if users is None and not trace.timed:
        users = max((f.users or 0 for f in swept if f.good >= GOOD), default=min(counts))
    scales = 1.0, 1 + error, 1 - error
    last = [SimulatedRun(layout=one, users=users, scale=scale) for one in layouts for scale in scales]
    ended = simulate(job.model_copy(update={"runs": last}), lambda done: show(len(runs) + done, "intervals"))
    curves, chosen = (
        {one.name: [figures for figures in found if figures.layout == one.name] for one in layouts}
        for found in (swept, ended)
    )
    winner, stays = choose_winner(layouts, chosen)
    return TracePlan(trace, job, users, error, layouts, curves, chosen, winner, stays)


def user_counts(users: int | None) -> list[int]:
    """Return the numbers of users that every layout is simulated with."""
    return sorted({*USERS, *([users] if users else [])})


def choose_winner(layouts: Sequence[Layout], chosen: dict[str, list[TrafficFigures]]) -> tuple[Layout | None, bool]:
    """Return the best usable layout that meets the SLO; the default stays if it meets it within the model's error."""
    able = [one for one in layouts if one.usable and chosen[one.name][0].good >= GOOD]
    if not able:
        return None, False
    best, default = max(able, key=lambda one: chosen[one.name][0].goodput_tok_s), layouts[0]
    if default in able:
        _, slow, _ = chosen[best.name]
        _, _, fast = chosen[default.name]
        if slow.goodput_tok_s <= fast.goodput_tok_s:
            return default, True
    return best, best is default

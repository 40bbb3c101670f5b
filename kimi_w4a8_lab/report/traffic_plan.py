"""Page and table of `rank`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ..predict.simulation import TrafficFigures
from ..predict.trace_plan import GOOD, MODEL, TracePlan
from .page import Page, Picture, Section, Table, Tone, Words

_TIMES = ("TTFT p50", "p95, s", "TPOT p50", "p95, ms")
COLUMNS = ("layout", "recipe", "goodput, tok/s", "met", "hit rate", *_TIMES, "tok per GPU hour")


def rows(plan: TracePlan) -> list[list[str]]:
    """Return a row for each layout, the best first, with the interval of the model's error."""
    found = []
    for name in plan.ranking:
        layout = next(one for one in plan.layouts if one.name == name)
        middle = plan.chosen[name][0]
        cell = partial(_interval, plan.chosen[name])
        found.append(
            [
                name,
                layout.recipe if layout.usable else "none",
                cell(lambda one: one.goodput_tok_s, ",.0f"),
                f"{middle.good:.0%}",
                f"{middle.hit_rate:.0%}",
                cell(lambda one: one.ttft_p50_s, ".2f"),
                cell(lambda one: one.ttft_p95_s, ".2f"),
                cell(lambda one: one.tpot_p50_ms, ".1f"),
                cell(lambda one: one.tpot_p95_ms, ".1f"),
                f"{middle.tokens_per_gpu_hour:,.0f}",
            ]
        )
    return found


def _interval(found: Sequence[TrafficFigures], value: Callable[[TrafficFigures], float], form: str) -> str:
    values = [value(one) for one in found]
    return f"{values[0]:{form}} ({min(values):{form}} to {max(values):{form}})"


def notes(plan: TracePlan) -> list[str]:
    """Return what a reader must know of the figures."""
    requests = sum(1 for _ in plan.trace.turns())
    times = "by users that start one after another" if plan.users is not None else "at the recorded times"
    return [
        f"{plan.trace.format} trace, {len(plan.trace.sessions)} sessions with {requests} requests, sent {times}; "
        f"{plan.job.horizon_s / 60:g} minutes, accept length {plan.job.accept_length:g}.",
        f"Intervals: step times longer and shorter by {plan.error:.1%}, the model's mean error on published figures "
        "that did not fit it. None is published for four GPUs, DP attention, or short prefills after a long prefix.",
        f"A layout meets the SLO if {GOOD:.0%} of the requests meet both limits. Layouts without a recipe are priced "
        "only: no recipe here switches on KV in host memory yet.",
        "Not simulated: FP8 KV and 4 GPUs that prefill for 4 that decode (`python -m proof.account.not_yet` prices "
        "them for random prompts), and all-reduces in INT8 (`python -m proof.account`).",
    ]


def page(plan: TracePlan) -> Page:
    """Return the page: verdict, chart of goodput over users, and the table."""
    from .plots import goodput_curves  # optional: matplotlib

    tone: Tone = "better" if plan.winner else "worse"
    counts = sorted({one.users or 0 for found in plan.curves.values() for one in found})
    by_users = [
        [str(count), *(f"{one.goodput_tok_s:,.0f} ({one.good:.0%})" for one in at)]
        for count in counts
        for at in [[one for found in plan.curves.values() for one in found if one.users == count]]
    ]
    picture: Picture = goodput_curves(plan.curves)
    where = "recorded times" if plan.users is None else f"{plan.users} users"
    sections = [
        Section(f"Layouts at {where}", tables=[Table(COLUMNS, rows(plan))]),
        Section(
            "Goodput by users", tables=[Table(["users", *plan.curves], by_users, "tok/s (requests that met the SLO)")]
        ),
    ]
    verdicts = [Words(MODEL), *(Words(line) for line in plan.reasons())]
    subtitle = f"{plan.trace.name}, {plan.job.slo}"
    return Page(f"By a model: {plan.verdict}", verdicts, subtitle, picture, notes(plan), sections, tone)

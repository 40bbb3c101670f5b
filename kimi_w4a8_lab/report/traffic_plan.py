"""Page and table of `rank`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ..predict.simulation import TrafficFigures
from ..predict.trace_plan import GOOD, MODEL, TracePlan, too_long
from .page import Page, Picture, Section, Table, Tone, Words

_TIMES = ("TTFT p50", "p95, s", "TPOT p50", "p95, ms")
COLUMNS = ("layout", "goodput, tok/s", "gain", "met", "hit rate", *_TIMES, "tok per GPU hour")


def rows(plan: TracePlan) -> list[list[str]]:
    """Return a row for each layout, the best first, with intervals."""
    found = []
    for name in plan.ranking:
        middle, gain = plan.chosen[name][0], plan.gain(name)
        cell = partial(_interval, plan.chosen[name])
        found.append(
            [
                name,
                cell(lambda one: one.goodput_tok_s, ",.0f"),
                f"{gain.value:.2f}x ({gain.low:.2f}x to {gain.high:.2f}x)" if name != plan.layouts[0].name else "",
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
    job = plan.job
    times = "by users that start one after another" if plan.users is not None else "at the recorded times"
    if job.runs[0].lockstep:
        times = "in lockstep, all users at once, as in a benchmark and not as in service"
    found = [
        f"{plan.trace.format} trace, {len(plan.trace.sessions)} sessions with {requests} requests, sent {times}; "
        f"{job.horizon_s / 60:g} minutes, accept length {job.runs[0].accept_length:g}.",
        f"Intervals are the least and the largest value with step times longer and shorter by {plan.error:.1%} (the "
        "model's mean error on published figures that did not fit it), with the spread of published accept lengths, "
        "and with other orders of sessions. None is published for four GPUs, DP attention, or short prefills after a "
        "long prefix.",
        f"A layout meets the SLO if {GOOD:.0%} of the requests meet both limits. Refused requests have missed it.",
        "Not simulated: KV in host memory, FP8 KV, 4 GPUs that prefill for 4 that decode "
        "(`python -m proof.account.not_yet` prices them for random prompts), and all-reduces in INT8 "
        "(`python -m proof.account`).",
    ]
    if plan.trace.assumed:
        found.insert(1, plan.trace.assumed)
    shortest = min(one.longest for one in plan.layouts)
    if (more := too_long(plan.trace, shortest)) and requests:
        found.insert(1, f"{more} of {requests} requests have more than {shortest:,} tokens with their answers.")
    return found


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

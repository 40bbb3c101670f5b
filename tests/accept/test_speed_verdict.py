"""Planted speeds: as fast as expected, slow with the first thing to look at, or not judged with the reason."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.machine.hardware import Device, Machine
from kimi_w4a8_lab.accept.speed_verdict import judge, speed_figures, why_not_judged
from kimi_w4a8_lab.base.verdict import Verdict
from kimi_w4a8_lab.predict.machine_model import PRECISIONS
from kimi_w4a8_lab.predict.predict import of_workload, published_points
from kimi_w4a8_lab.speed.runs import Cell
from kimi_w4a8_lab.speed.statistics import Interval
from kimi_w4a8_lab.speed.workloads import load_workload

MI325X = Device("gfx942", 304, "0000:01:00.0", 0, 256 << 30)
TPOT, TTFT, RATE = "tpot_median_ms", "ttft_median_ms", "output_throughput_tok_s"
USERS = {"con2": 2, "con40": 40, "chat": 2}


def judged(
    planted: Mapping[str, float], side: str = "agent", point: str = "con40", length: float | None = 3.93
) -> tuple[Verdict, str]:
    """Judge figures of the model, or 1 where it has none, with the planted ones instead."""
    load = load_workload(point)
    model = {key: of_workload(side, load, USERS[point], length, key) or 1.0 for key in (TPOT, TTFT, RATE)}
    measured = {key: Interval(value, None, None) for key, value in {**model, **planted}.items()}
    cell = SimpleNamespace(side=side, workload=load, concurrency=USERS[point], accept_length=length, figures=measured)
    return judge(speed_figures(cast(Cell, cell), judged=True), "")


@pytest.mark.parametrize(
    ("planted", "look"),
    [
        ({RATE: 300.0}, "requests that waited"),
        ({TPOT: 60.0}, "the all-reduce"),
        ({TTFT: 20000.0, RATE: 300.0}, "the kernels' backend and gates"),
        ({TPOT: 60.0, TTFT: 20000.0, RATE: 300.0}, "clocks and power cap"),
    ],
)
def test_a_slow_speed_is_slow_and_names_the_first_thing_to_look_at(planted: dict[str, float], look: str) -> None:
    verdict, found = judged(planted)
    assert verdict is Verdict.SLOW and f"Look first at {look}" in found
    if RATE in planted:
        assert "output throughput 300 tok/s, limit 804.8" in found
    assert judged({}) == (Verdict.PASS, "as fast as expected")


def test_an_accept_length_below_that_of_the_text_is_slow_though_the_model_allows_for_it() -> None:
    verdict, found = judged({}, length=1.2)
    assert (
        verdict is Verdict.SLOW and "accept length 1.2 tokens, limit 3.537" in found and "draft's checkpoint" in found
    )


@pytest.mark.parametrize("side", sorted({point.side for point in published_points()} - {"w8a8"}))
@pytest.mark.parametrize("point", ["con2", "con40"])
def test_every_published_figure_is_fast_enough(side: str, point: str) -> None:
    length = None if side in PRECISIONS else {"con2": 3.97, "con40": 3.93}[point]
    for one in published_points():
        if (one.point, one.side) == (point, side) and one.key in (TPOT, TTFT, RATE):
            assert judged({one.key: one.published}, side, point, length) == (Verdict.PASS, "as fast as expected"), one


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_a_figure_that_is_no_number_is_never_a_pass(value: float) -> None:
    with pytest.raises(KimiError, match="nothing was measured"):
        judged({TPOT: value})


@pytest.mark.parametrize(
    ("devices", "prompts", "why"),
    [
        ((), None, "has no GPU"),
        ((MI325X,) * 4, None, "has 4 x MI325X"),
        ((replace(MI325X, hbm_bytes=192 << 30),) * 8, None, "has 8 x MI300X"),
        ((replace(MI325X, arch="gfx90a"),) * 8, None, "has 8 x unknown"),
        ((MI325X,) * 8, 8, "a quick run sends only 8 prompts"),
        ((MI325X,) * 8, None, "$"),
    ],
)
def test_other_hardware_and_few_prompts_are_not_judged(
    devices: tuple[Device, ...], prompts: int | None, why: str
) -> None:
    reason = why_not_judged(Machine(devices), prompts)
    assert why in reason if why != "$" else reason == ""
    if reason:
        cell = SimpleNamespace(
            side="agent", workload=load_workload("con40"), concurrency=40, accept_length=3.9,
            figures=dict.fromkeys((TPOT, TTFT, RATE), Interval(300.0, None, None)),
        )  # fmt: skip
        figures = speed_figures(cast(Any, cell), judged=False)
        assert [figure.limit for figure in figures] == [None] * 4
        assert judge(figures, reason) == (Verdict.MEASURED, reason)

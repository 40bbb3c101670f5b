"""The time of a prefill and of a decode step: the fitted model's, with cached tokens and with DP attention."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kimi_w4a8_eagle3.recipe.launch import load_recipe, render
from kimi_w4a8_lab.predict.layouts import DP_ATTENTION, GROUPS, layout
from kimi_w4a8_lab.predict.machine_model import Cluster
from kimi_w4a8_lab.predict.predict import Load, calibrate, predict
from kimi_w4a8_lab.predict.step_time import KimiStepTime

FIT = calibrate(Cluster())


def test_a_layout_has_the_pool_of_the_memory_plan_and_can_be_served() -> None:
    one = layout("agent")
    assert (one.name, one.kv_tokens, one.chunk, one.cluster.groups) == ("TP 8", 1_702_894, 8192, 1)
    for count in GROUPS:
        settings = (*DP_ATTENTION, f"dp-size={count}")
        many = layout("agent", *settings)
        assert (many.name, many.cluster.groups, many.chunk) == (f"TP 8, DP {count}", count, 16384 // count)
        assert many.kv_tokens > one.kv_tokens and render(load_recipe("agent"), settings).refused == []


def test_a_cold_prompt_takes_the_time_of_the_fitted_model() -> None:
    step, load = KimiStepTime(FIT, Cluster()), Load(40, steps=3, accept_length=2.7)
    alone = predict(replace(load, concurrency=1), "ttft_median_ms", FIT, Cluster())
    assert step.prefill([[(10240, 0)]]) * 1000 == pytest.approx(alone)
    context = 10240 + 256
    verify = step.decode([(40, 40 * context)]) * 1000 / 2.7
    assert verify == pytest.approx(predict(load, "itl_median_ms", FIT, Cluster()))


def test_cached_tokens_save_time_and_short_prompts_still_read_the_weights() -> None:
    step = KimiStepTime(FIT, Cluster())
    whole, rest, short = step.prefill([[(65536, 0)]]), step.prefill([[(512, 65024)]]), step.prefill([[(1, 0)]])
    assert rest < whole / 20 and 0.005 < short < step.prefill([[(2000, 0)]])


def test_dp_attention_splits_requests_and_their_kv() -> None:
    tp, dp = KimiStepTime(FIT, Cluster()), KimiStepTime(FIT, Cluster(groups=8))
    context = 64 * 65536
    assert dp.decode([(8, context / 8)] * 8) < tp.decode([(64, context)])  # heads are computed 16 at once
    assert dp.prefill([[(8192, 0)], *[[]] * 7]) > tp.prefill([[(8192, 0)]])  # a single prompt has one GPU's attention

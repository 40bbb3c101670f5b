"""Ranking of layouts: SLO, winner, intervals, page and messages, without a simulation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.plans import LAYOUTS, plan

from kimi_w4a8_eagle3.base.errors import KimiError, UsageError
from kimi_w4a8_eagle3.cli import load
from kimi_w4a8_lab.predict.layouts import Layout
from kimi_w4a8_lab.predict.machine_model import Cluster
from kimi_w4a8_lab.predict.predict import Load, calibrate, predict
from kimi_w4a8_lab.predict.simulation import Slo
from kimi_w4a8_lab.predict.step_time import KimiStepTime
from kimi_w4a8_lab.predict.trace_plan import MODEL
from kimi_w4a8_lab.report import traffic_plan
from kimi_w4a8_lab.report.page import write_page

FIT = calibrate(Cluster())


def test_an_slo_has_both_limits() -> None:
    assert Slo.parse("ttft=2s,tpot=40ms") == Slo.parse("tpot=0.04s, ttft=2000ms") == Slo(2.0, 0.04)


@pytest.mark.parametrize("text", ["", "ttft=2s", "ttft=2,tpot=40ms", "ttft=2s,ttft=3s", "ttft=0s,tpot=4ms", "x=2s"])
def test_another_slo_is_one_message(text: str) -> None:
    with pytest.raises(UsageError, match="not an SLO"):
        Slo.parse(text)


def test_layouts_have_the_pools_of_the_memory_plan() -> None:
    one, two, many, with_host, _, _ = LAYOUTS
    assert [layout.name for layout in LAYOUTS[:3]] == ["1 x TP 8", "2 x TP 4", "1 x TP 8, DP 8"]
    assert (one.kv_tokens, many.groups) == (1_702_894, 8) and many.chunk == 2048 and two.max_running == 32
    assert one.usable and many.usable and not with_host.usable
    assert 2e6 < with_host.host < 3e6 and one.host == 0


def test_a_clear_gain_names_the_recipe_and_its_flags() -> None:
    found = plan({"2 x TP 4": 200.0})
    assert found.winner is not None and found.winner.recipe == "agent-2x4"
    assert "Recipe agent-2x4" in found.verdict and "tp-size=4, options.replicas=2" in found.reasons()[0]


def test_within_the_models_error_the_default_stays() -> None:
    found = plan({"2 x TP 4": 115.0})
    assert found.default_stays and "default, recipe agent, stays" in found.verdict and found.reasons() == []


def test_a_layout_without_a_recipe_never_wins() -> None:
    found = plan({"2 x TP 4, host KV": 900.0})
    assert found.ranking[0] == "2 x TP 4, host KV" and found.winner is not None and found.winner.recipe == "agent"


def test_an_slo_that_no_layout_meets_names_the_nearest() -> None:
    found = plan({"2 x TP 4": 200.0}, good=0.5)
    assert found.winner is None and "The nearest is 2 x TP 4, with 50% of the requests" in found.verdict


def test_the_page_begins_with_the_verdict_and_says_that_it_is_a_model(tmp_path: Path) -> None:
    text = write_page(traffic_plan.page(plan({"2 x TP 4": 200.0})), tmp_path).read_text()
    assert text.index("By a model: Recipe agent-2x4") < text.index(MODEL[:20]) < text.index("1 x TP 8, host KV")
    picture = (tmp_path / "goodput.svg").read_text()
    assert ">4</text>" in picture and "$" not in picture and "200 (180 to 220)" in text


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


def test_every_layout_is_a_layout() -> None:
    assert all(isinstance(layout, Layout) for layout in LAYOUTS)
    assert len({layout.name for layout in LAYOUTS}) == len(LAYOUTS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["t.jsonl", "--slo", "fast"], "not an SLO"),
        (["none.jsonl", "--slo", "ttft=2s,tpot=40ms"], "cannot read the trace"),
    ],
)
def test_wrong_words_give_one_message_and_write_nothing(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KimiError) as caught:
        load("rank").main([*words, "-o", "page"], standalone_mode=False)
    assert said in str(caught.value)
    assert list(tmp_path.iterdir()) == []

"""The machine model against published figures and the memory plan, and its layouts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.recipe.launch import load_recipe, render
from kimi_w4a8_eagle3.recipe.memory_plan import ModelCard, target_weights
from kimi_w4a8_lab.predict.layouts import DP_ATTENTION, GROUPS, layout
from kimi_w4a8_lab.predict.machine_model import (
    PRECISIONS,
    Cluster,
    expert_weights,
    experts_touched,
    fixed_weights,
    kimi,
)
from kimi_w4a8_lab.predict.predict import (
    Load,
    acceptance_probability,
    calibrate,
    check,
    choices,
    mean_error,
    median_chunk,
    predict,
)

CLUSTER = Cluster()
FIT = calibrate(CLUSTER)


def test_a_layout_has_the_pool_of_the_memory_plan_and_can_be_served() -> None:
    one = layout("agent")
    assert (one.name, one.kv_tokens, one.chunk, one.cluster.groups) == ("TP 8", 1_702_894, 8192, 1)
    for count in GROUPS:
        settings = (*DP_ATTENTION, f"dp-size={count}")
        many = layout("agent", *settings)
        assert (many.name, many.cluster.groups, many.chunk) == (f"TP 8, DP {count}", count, 16384 // count)
        assert many.kv_tokens > one.kv_tokens and render(load_recipe("agent"), settings).refused == []


@pytest.mark.parametrize(("accept_length", "size"), [(3.93, 4), (2.69, 4), (2.3, 3), (1.6, 2), (1.1, 1)])
def test_the_median_itl_follows_the_rule_of_sglangs_generator(accept_length: float, size: int) -> None:
    """The generator counts the time of a chunk, divided by its tokens, once for each token."""
    alpha, rng = acceptance_probability(accept_length, 3), np.random.default_rng(0)
    chunks = 1 + np.cumprod(rng.random((20000, 3)) < alpha, axis=1).sum(axis=1)
    assert np.mean(chunks) == pytest.approx(accept_length, rel=0.01)
    assert np.median(np.repeat(12.0 / chunks, chunks)) == 12.0 / size == 12.0 / median_chunk(accept_length, 3)
    assert median_chunk(1.0, 0) == 1


def test_weights_have_the_price_of_the_recipes_checkpoint() -> None:
    """One checkpoint serves `w4a16` and `w4a8`, with a scale for each row."""
    recipes = [load_recipe(name) for name in ("w4a16", "w4a8")]
    assert len({recipe.model.repo for recipe in recipes}) == 1
    assert {PRECISIONS[recipe.name].bytes_per_weight for recipe in recipes} == {0.5}


def test_dp_attention_splits_requests_and_their_kv() -> None:
    groups = Cluster(groups=8)
    itl, ttft = (
        [predict(Load(count, length), key, FIT, cluster) for cluster in (CLUSTER, groups)]
        for count, length, key in ((64, 65536, "itl_median_ms"), (1, 8192, "ttft_median_ms"))
    )
    assert itl[1] < itl[0]  # heads are computed 16 at once
    assert ttft[1] > ttft[0]  # a single prompt has one GPU's attention


def test_the_model_meets_its_calibration_and_comes_near_the_rest() -> None:
    points = check(FIT, CLUSTER)
    assert sum(point.calibrated for point in points) == 3
    assert all(abs(point.error) < 1e-9 for point in points if point.calibrated)
    assert mean_error(points) < 0.10
    speculative = [point for point in points if "eagle3" in point.side and point.key == "tpot_median_ms"]
    assert len(speculative) == 3 and all(abs(point.error) < 0.06 for point in speculative)


def test_weights_of_a_gpu_add_up_to_the_checkpoint() -> None:
    shapes = kimi()
    routed = shapes.experts * expert_weights(shapes, 8) * shapes.moe_layers
    assert (fixed_weights(shapes, 8) * 2 + routed * 0.5) / 2**30 == pytest.approx(63.5, rel=0.05)


@given(st.integers(1, 400))
def test_experts_touched_grow_with_the_tokens(tokens: int) -> None:
    shapes = kimi()
    assert shapes.top_k - 1e-9 <= experts_touched(tokens, shapes) <= shapes.experts
    assert experts_touched(tokens, shapes) < experts_touched(tokens + 1, shapes)


@given(st.floats(0.01, 0.999), st.integers(1, 7))
def test_acceptance_probability_is_inverted(alpha: float, steps: int) -> None:
    length = sum(alpha**i for i in range(steps + 1))
    assert acceptance_probability(length, steps) == pytest.approx(alpha, abs=1e-6)


def test_text_that_is_hard_to_draft_wants_fewer_steps() -> None:

    def best(length: float) -> int:
        found = choices(Load(40, steps=3, accept_length=length), FIT, CLUSTER)
        return max(found, key=lambda choice: choice.throughput_tok_s).steps

    assert best(1.1) == 0
    assert best(1.1) < best(2.2) < best(3.9)


@pytest.mark.parametrize("load", [{"accept_length": 4.1, "steps": 3}, {"concurrency": 0}, {"output_len": 1}])
def test_impossible_loads_are_refused(load: dict[str, float]) -> None:
    with pytest.raises(KimiError):
        Load(**{"concurrency": 2, **load})  # type: ignore[arg-type]


def test_a_step_reads_what_the_memory_plan_stores_but_the_second_kv_b() -> None:
    stored, layers = target_weights(ModelCard.packaged("kimi-k2.5-w4a8"), 8), 61
    kept = sum(stored[kind] for kind in ("attention", "dense MLP", "shared experts", "router"))
    lm_head, kv_b, norms = 163_840 * 7168 / 8, layers * 512 * 64 * (128 + 128) / 8, layers * 2 * 7168
    assert fixed_weights(kimi(), 8) * 2 == kept + (lm_head - kv_b - norms) * 2

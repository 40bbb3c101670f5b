"""Weights from configs alone, the memory map that adds up, and `kimi-w4a8 plan` in its three forms."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_eagle3.machine.aiter_regime import Regime
from kimi_w4a8_eagle3.machine.hardware import GIB, gpu_by_name
from kimi_w4a8_eagle3.recipe.launch import load_recipe, resolve, with_settings
from kimi_w4a8_eagle3.recipe.memory_plan import (
    MemoryPlan,
    ModelCard,
    draft_weights,
    make_plan,
    short_pool,
    target_weights,
)
from kimi_w4a8_lab.predict.layouts import DP_ATTENTION

KIMI = ModelCard.packaged("kimi-k2.5-w4a8")
EAGLE = ModelCard.packaged("kimi-k2.5-eagle3")
PLAN = ["plan", "-r", "eagle3-opt", "--gpu", "mi325x", "--aiter", "0.1.12"]
PUBLISHED_GIB = 497  # the checkpoint's published size


def plan_of(
    recipe: str = "eagle3-opt",
    gpu: str = "mi325x",
    regime: Regime = Regime.UNKNOWN,
    memory_ceiling: float = 0.824,
    **args,
) -> MemoryPlan:
    chosen = with_settings(load_recipe(recipe), {"options.memory_ceiling": memory_ceiling})
    return make_plan(chosen, {"tp-size": 8, **args}, gpu_by_name(gpu), regime)


def test_the_checkpoint_has_its_published_size() -> None:
    whole = target_weights(KIMI, 1)
    absorbed = 61 * 512 * 64 * 256 * 2  # the second copy of kv_b is made at load time, it is not in the checkpoint
    assert (sum(whole.values()) - absorbed) / GIB == pytest.approx(PUBLISHED_GIB, rel=0.005)


def test_dp_attention_splits_attention_over_fewer_ranks() -> None:
    """Each rank has all heads: target weights of one GPU, draft KV of all heads, and a pool that int32 can index."""
    whole = plan_of("agent", **resolve(load_recipe("agent")).args)
    split = plan_of("agent", **resolve(load_recipe("agent"), ["enable-dp-attention=true", "dp-size=8"]).args)
    assert split.weights["attention"] == target_weights(KIMI, 1)["attention"]
    assert split.draft_kv and whole.draft_kv and split.draft_kv.row_elements == 8 * whole.draft_kv.row_elements
    assert split.verdict.max_total_tokens == 262_143 < whole.verdict.max_total_tokens
    assert split.weights["routed experts"] == whole.weights["routed experts"]
    assert split.weights["draft"] == draft_weights(EAGLE, 1)["draft"]  # SGLang loads the draft in the group
    table = 163840 * 7168 * 2  # the input embedding is whole in each group, the output head is split over all ranks
    assert split.weights["embeddings, lm_head"] == table + table // 8
    assert whole.weights["embeddings, lm_head"] == 2 * table // 8
    mla = resolve(load_recipe("agent"), [*DP_ATTENTION, "dp-size=8"])
    recipe = make_plan(mla.recipe, mla.args, gpu_by_name("mi325x"), Regime.UNKNOWN)
    assert recipe.tokens > 3 * split.tokens and recipe.draft_kv and recipe.draft_kv.kind == "mla"
    with pytest.raises(KimiError, match="TP 8 cannot be divided into 3 groups"):
        plan_of(**{"enable-dp-attention": True, "dp-size": 3})


def test_a_pool_below_one_context_is_named() -> None:
    args = resolve(load_recipe("agent"), ["tp-size=4"]).args
    small = plan_of("agent", "mi300x", **args)
    assert "94,966 tokens is smaller than one context of 131,072" in str(short_pool(small, args))
    whole = plan_of("agent", "mi325x", **args)
    assert short_pool(whole, args) is None
    assert "1,000 tokens is smaller" in str(short_pool(whole, {**args, "max-total-tokens": 1000}))


@pytest.mark.parametrize(("stated", "kv_heads"), [(64, 64), (None, 64), (8, 8)])
def test_draft_weights_by_hand(stated: int | None, kv_heads: int) -> None:
    draft = replace(EAGLE, config={**EAGLE.config, "num_key_value_heads": stated})
    layer = 2 * 7168 * (8192 + 2 * 128 * kv_heads) + 8192 * 7168 + 3 * 7168 * 12288
    assert draft_weights(draft, 8)["draft"] == 2 * (layer // 8 + 3 * 7168 * 7168 + 163840 * 7168 // 8)


def test_the_map_adds_up_to_the_gpu() -> None:
    for gpu in ("mi325x", "mi355x"):
        plan = plan_of(gpu=gpu)
        assert sum(plan.segments.values()) == plan.gpu.hbm_bytes
        assert all(size >= 0 for size in plan.segments.values())


def test_the_published_fractions_on_mi325x() -> None:
    plan = plan_of()
    assert plan.budget.tokens(0.90) > 2_097_151 >= plan.budget.tokens(0.80)
    assert plan.verdict.limit == 2_097_151
    assert plan.tokens == 2_093_740 and plan.requests() == 194
    assert plan.verdict.binding is None  # the ceiling comes a little before the kernel's limit


def test_an_mla_draft_takes_the_page_limit_away() -> None:
    plan, open_plan = plan_of("eagle3-mla"), plan_of("eagle3-mla", memory_ceiling=0.9)
    assert plan.draft_kv is not None and plan.draft_kv.bytes_per_token == 1_152
    assert plan.budget.cell_bytes == plan.sizing.cell_bytes == 71_424
    assert plan.verdict.limit == 3_728_269 and plan.verdict.binding is None
    assert (plan.tokens, open_plan.tokens) == (2_182_148, 2_474_637)
    assert plan_of(memory_ceiling=0.9).verdict.max_total_tokens == 2_097_151  # the MHA draft's, on the same AITER


def test_sglang_takes_a_draft_layer_for_a_target_layer() -> None:
    plan = plan_of()
    assert plan.budget.cell_bytes == 74_368 and plan.sizing.cell_bytes == 71_424
    assert plan.sizing.tokens(0.80) > plan.budget.tokens(0.80)
    assert plan_of("w4a8").sizing.cell_bytes == plan_of("w4a8").budget.cell_bytes == 70_272


def test_dense_products_in_fp8_take_a_byte_more_or_less() -> None:
    agent, fast = (plan_of(name, **resolve(load_recipe(name)).args) for name in ("agent", "agent-fast"))
    latents, split = 7168 * 2112, (1536 * 64 * 192 + 512 * 64 * 256 + 64 * 128 * 7168) // 8
    less = {
        "attention": 61 * (latents + split),  # kv_b's absorbed halves stay BF16
        "shared experts": 60 * 3 * 7168 * 2048 // 8,
        "dense MLP": 3 * 7168 * 18432 // 8,
    }
    both, alone = fast.weights, target_weights(KIMI, 8, dense_fp8="all")
    assert {kind: size - agent.weights[kind] for kind, size in both.items() if size != agent.weights[kind]} == less
    assert {kind: agent.weights[kind] - size for kind, size in alone.items() if size != agent.weights[kind]} == less
    assert agent.tokens - fast.tokens == pytest.approx(sum(less.values()) / agent.sizing.cell_bytes, abs=2)


def test_an_fp8_draft_takes_half_the_bytes_of_its_layer() -> None:
    bf16, fp8 = (draft_weights(ModelCard.packaged(name), 4) for name in ("kimi-k2.5-eagle3", "kimi-k2.5-eagle3-fp8"))
    layer = (2 * 7168 * 3 * 8192 + 8192 * 7168 + 3 * 7168 * 12288) // 4
    assert bf16["draft"] - fp8["draft"] == layer  # one byte of two, of the seven projections


def test_a_stated_chunk_and_graph_size_are_counted_and_leave_less_to_the_pool() -> None:
    args = resolve(load_recipe("agent")).args
    agent = make_plan(load_recipe("agent"), args, gpu_by_name("mi325x"), Regime.UNKNOWN)
    eagle3 = plan_of(**{"attention-backend": "aiter"})
    assert agent.segments["graphs"] == 64 * (2 << 20) + (3 << 29) < eagle3.segments["graphs"]
    assert agent.segments["activations"] == 8192 * 1.5 * 2**20 + 2**29 + 2**30
    assert agent.segments["reserve"] > 0 and agent.tokens == eagle3.tokens
    large = plan_of(**{"chunked-prefill-size": 65536})
    assert large.segments["reserve"] >= 0 and large.tokens < agent.tokens  # 98 GiB of activations come first


def test_without_a_draft_memory_is_the_limit() -> None:
    plan = plan_of("w4a8")
    assert plan.verdict.binding is None and plan.draft_kv is None and "draft" not in plan.segments


def test_fp8_cache_halves_the_bytes_not_the_offset_limit() -> None:
    plan = plan_of(**{"kv-cache-dtype": "fp8_e4m3"})
    assert plan.budget.cell_bytes == 74_368 // 2 and plan.verdict.max_total_tokens == 2_097_151
    latents = plan_of("eagle3-mla", **{"kv-cache-dtype": "fp8_e4m3"})
    assert latents.budget.cell_bytes == 71_424 // 2 and latents.verdict.max_total_tokens == 3_728_269
    wide = {"kv-cache-dtype": "fp8_e4m3", "speculative-draft-kv-cache-dtype": "bf16"}
    assert plan_of("eagle3-mla", **wide).budget.cell_bytes == 61 * 576 + 1_152


def test_a_directory_is_read_instead_of_the_card(tmp_path: Path) -> None:
    config = {**EAGLE.config, "num_key_value_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    card = ModelCard.from_directory(tmp_path)
    plan = make_plan(load_recipe("eagle3"), {"tp-size": 8}, gpu_by_name("mi325x"), Regime.UNKNOWN, KIMI, card)
    assert plan.draft_kv is not None and plan.draft_kv.row_elements == 128
    assert plan.verdict.binding is None  # eight times fewer heads: memory binds first


@pytest.mark.parametrize("text", [None, "{", '{"num_hidden_layers": 1}'])
def test_a_bad_directory_is_an_error(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(KimiError):
        target_weights(ModelCard.from_directory(tmp_path), 8)


def test_kimi_plan_prints_the_guards_numbers() -> None:
    result = CliRunner().invoke(app, PLAN)
    assert result.exit_code == 0, result.output
    for expected in (
        "1,702,894 tokens = 158 requests",
        "at 0.90 SGLang makes 1,951,510 tokens, within",
        "routed experts",
        "ceiling: 0.824 of the memory",
    ):
        assert expected in result.output


def test_kimi_plan_as_json() -> None:
    split, fixed = (
        json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
        for words in ([*PLAN, "--tp", "4"], [*PLAN[:-1], "0.1.13"])
    )
    assert split["tp"] == 4 and split["guard"]["limit_tokens"] == 1_048_575  # 16 KV heads a rank: half the tokens
    assert sum(split["segments"].values()) == split["hbm_bytes"] == 256 * GIB
    guard = fixed["guard"]
    assert guard["limit_tokens"] == 3_728_269 and guard["max_total_tokens"] == 1_702_894  # MLA's window, the ceiling
    assert fixed["known_faults"] == []


def test_kimi_plan_compares_gpus_in_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    gpus = ["plan", "eagle3", "--aiter", "0.1.12", "--gpu", "mi300x,mi325x,mi355x"]
    text = CliRunner().invoke(app, gpus).output
    rows = {row[0]: row[1:] for line in text.splitlines() if (row := [cell.strip() for cell in line.split("|")[1:-1]])}
    assert rows["mi300x"] == ["gfx942", "192", "65.9", "1,029,015", "95", "memory"]
    assert rows["mi325x"][3:] == ["1,702,894", "158", "memory"]
    assert rows["mi355x"][3:] == ["1,863,186", "173", "Gluon mla decode"]
    assert "gfx950: memory only; the recipe is for gfx942" in text
    four = json.loads(CliRunner().invoke(app, [*gpus, "--tp", "4", "--json"]).stdout)
    assert {plan["gpu"]: plan["kv_tokens"] for plan in four} == {
        "mi300x": 94_966,
        "mi325x": 768_845,
        "mi355x": 1_046_901,
    }


def test_mi300x_holds_the_recipe_with_a_chunk_of_8192() -> None:
    plan = make_plan(
        (recipe := load_recipe("eagle3-mi300x")), resolve(recipe).args, gpu_by_name("mi300x"), Regime.UNKNOWN
    )
    assert plan.tokens == 1_029_015 and plan.segments["reserve"] > 16 * GIB
    by_itself = plan.segments["activations"] + 8192 * 1.5 * 2**20  # a chunk of 16,384, as SGLang takes it
    assert 25 * GIB < by_itself < plan.segments["activations"] + plan.segments["reserve"] < 53 * GIB


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-r", "eagle3", "--gpu", "mi300"], "did you mean 'mi300x'"),
        (["-r", "tiny"], "uses no GPU"),
        (["-r", "eagle3", "--gpu", "mi300x", "--tp", "2"], "no room for the KV cache"),
        (["-r", "eagle3", "--model", "/does/not/exist"], "config.json is missing"),
    ],
)
def test_kimi_plan_refuses(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code != 0 and message in str(result.exception)

"""SGLang's own parser accepts what a recipe renders; eagle3-opt is the published command but for what its notes say."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from support.sglang_program import found

from kimi_w4a8_eagle3.machine.hardware import Machine
from kimi_w4a8_eagle3.recipe.launch import load_recipe, recipe_names, render

# The article's launch command and environment, as facts to compare with.
PUBLISHED = """
--model amd/Kimi-K2.5-W4A8 --tp 8 --attention-backend aiter --host 0.0.0.0 --port 9527 --mem-fraction-static 0.80
--trust-remote-code --disable-radix-cache --enable-torch-compile --numa-node 0 0 0 0 1 1 1 1
--speculative-algorithm EAGLE3 --speculative-draft-model-path lightseekorg/kimi-k2.5-eagle3 --speculative-num-steps 3
--speculative-eagle-topk 1 --speculative-num-draft-tokens 4
"""
PUBLISHED_ENV = """
TRITON_MAX_CACHE_SIZE=2147483648 AITER_FLYDSL_MOE_COMPARE_STAGE2=0 AITER_FLYDSL_MOE_COMPARE=0 AITER_FLYDSL_DEBUG=0
AITER_ENFORCE_DSL=1 DSL2_ROOT=/opt/FlyDSL AITER_USE_FLYDSL_MOE=1 AITER_USE_FLYDSL_MOE_STAGE1=1
AITER_USE_FLYDSL_MOE_STAGE2=1 MLIR_PATH=/opt/mlir_install CK_TILE_FLOAT_TO_BFLOAT16_DEFAULT=3 AITER_W4A8_USE_INT8=1
SGLANG_DISABLE_CUDNN_CHECK=1 SGLANG_USE_AITER=1 SGLANG_NUMA_BIND_V2=1
FLYDSL_MOE_STAGE1_SCHED=0 AITER_FLYDSL_STAGE2_TILE_K=256
"""
SERVED = [name for name in recipe_names() if name != "tiny" and load_recipe(name).engine == "sglang"]
OPTIONS = {
    "target": ("eagle3-opt", ["options.sampling=target"]),
    "rccl": ("eagle3-opt", ["options.all_reduce=rccl"]),
    "pinned": ("eagle3-opt", [f"model.revision={'a' * 40}", f"draft.revision={'b' * 40}"]),
}


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    commands = {name: _arguments(name, []) for name in SERVED}
    commands |= {name: _arguments(recipe, settings) for name, (recipe, settings) in OPTIONS.items()}
    commands["published"] = shlex.split(PUBLISHED)
    commands["misspelt"] = [*commands["eagle3-opt"], "--watchdog-timeot", "1"]
    path = tmp_path_factory.mktemp("parsed") / "commands.json"
    path.write_text(json.dumps(commands))
    return found(Path(__file__).with_name("sglang_parser.py").read_text(), False, str(path))


def _arguments(name: str, settings: list[str]) -> list[str]:
    launch = render(load_recipe(name), settings, machine=Machine())
    assert launch.argv[1:3] == ["-m", "sglang.launch_server"]
    return launch.argv[3:]


def test_every_recipe_is_accepted(parsed: dict[str, dict]) -> None:
    for name in [*SERVED, *OPTIONS]:
        assert parsed[name].get("unknown") == [], (name, parsed[name])


def test_the_parser_would_refuse_a_mistake(parsed: dict[str, dict]) -> None:
    assert parsed["misspelt"]["unknown"] == ["--watchdog-timeot", "1"]


def test_eagle3_opt_is_the_published_command_but_for_explained_differences(parsed: dict[str, dict]) -> None:
    ours, published = parsed["eagle3-opt"]["values"], parsed["published"]["values"]
    differing = {name for name in published if ours[name] != published[name]}
    assert differing == {"host", "mem_fraction_static", "max_total_tokens", "watchdog_timeout", "enable_metrics"}
    notes = "\n".join(render(load_recipe("eagle3-opt"), machine=Machine()).notes)
    for name in differing:
        assert f"--{name.replace('_', '-')}" in notes


def test_eagle3_opt_has_the_published_environment() -> None:
    expected = dict(pair.split("=", 1) for pair in PUBLISHED_ENV.split())
    assert render(load_recipe("eagle3-opt"), machine=Machine()).env == expected


def test_options_reach_the_engine(parsed: dict[str, dict]) -> None:
    assert parsed["target"]["values"]["speculative_use_rejection_sampling"] == "True"
    assert parsed["eagle3-opt"]["values"]["speculative_use_rejection_sampling"] == "False"
    assert parsed["rccl"]["values"]["disable_custom_all_reduce"] == "True"
    assert parsed["pinned"]["values"]["revision"] == repr("a" * 40)
    assert parsed["pinned"]["values"]["speculative_draft_model_revision"] == repr("b" * 40)


def test_watchdog_outlasts_a_cold_kernel_build(parsed: dict[str, dict]) -> None:
    cold_build_s = 633  # the longest that was reported for AITER
    assert float(parsed["eagle3-opt"]["values"]["watchdog_timeout"]) > cold_build_s

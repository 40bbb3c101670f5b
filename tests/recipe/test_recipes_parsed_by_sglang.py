"""SGLang's own parser accepts what a recipe renders; eagle3-opt is the published command but for what its notes say."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from support.sglang_program import RELEASES, VERSIONS, found

from kimi_w4a8_eagle3.machine.hardware import Machine
from kimi_w4a8_eagle3.recipe.launch import load_recipe, recipe_names, render
from kimi_w4a8_eagle3.recipe.on_machine import known_faults

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
SERVED = [name for name in recipe_names() if name != "tiny"]
OPTIONS = {
    "published all-reduce": ("eagle3-opt", ["disable-custom-all-reduce=false"]),
    "FP8 cache": ("eagle3-mla", ["kv-cache-dtype=fp8_e4m3"]),
    "fused all-reduce": ("eagle3-opt", ["disable-custom-all-reduce=false", "enable-aiter-allreduce-fusion=true"]),
    "pinned": ("eagle3-opt", [f"model.revision={'a' * 40}", f"draft.revision={'b' * 40}"]),
}


@pytest.fixture(scope="module", params=RELEASES, ids=VERSIONS)
def parsed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    commands = {name: _arguments(name, []) for name in SERVED}
    commands |= {name: _arguments(recipe, settings) for name, (recipe, settings) in OPTIONS.items()}
    commands["published"] = shlex.split(PUBLISHED)
    path = tmp_path_factory.mktemp("parsed") / "commands.json"
    path.write_text(json.dumps(commands))
    return found(Path(__file__).with_name("sglang_parser.py").read_text(), request.param, str(path))


def _arguments(name: str, settings: list[str]) -> list[str]:
    launch = render(load_recipe(name), settings, machine=Machine())
    assert launch.argv[1:3] == ["-m", "sglang.launch_server"]
    return launch.argv[3:]


def test_every_recipe_is_accepted(parsed: dict[str, dict]) -> None:
    for name in [*SERVED, *OPTIONS]:
        assert parsed[name].get("unknown") == [], (name, parsed[name])


def test_every_argument_of_a_known_fault_exists(parsed: dict[str, dict]) -> None:
    names = {name.replace("-", "_") for fault in known_faults() for name in (*fault.args, *fault.set)}
    assert len(names) > 5 and names <= set(parsed["eagle3-opt"]["values"])


def test_eagle3_opt_is_the_published_command_but_for_explained_differences(parsed: dict[str, dict]) -> None:
    ours, published = parsed["eagle3-opt"]["values"], parsed["published"]["values"]
    differing = {name for name in published if ours[name] != published[name]}
    assert differing == {
        "host",
        "mem_fraction_static",
        "max_total_tokens",
        "watchdog_timeout",
        "enable_metrics",
        "disable_shared_experts_fusion",
        "disable_custom_all_reduce",
    }
    notes = "\n".join(map(str, render(load_recipe("eagle3-opt"), machine=Machine()).notes))
    for name in differing:
        assert f"--{name.replace('_', '-')}" in notes


def test_eagle3_opt_has_the_published_environment_and_explains_what_it_adds() -> None:
    recipe = load_recipe("eagle3-opt")
    assert recipe.env == dict(pair.split("=", 1) for pair in PUBLISHED_ENV.split())
    launch = render(recipe, machine=Machine())
    added = {name: value for name, value in launch.env.items() if name not in recipe.env}
    assert added == {
        "SGLANG_WARMUP_TIMEOUT": "3600",
        "HIP_FORCE_DEV_KERNARG": "1",
        "HSA_ENABLE_IPC_MODE_LEGACY": "1",
        "ROCM_QUICK_REDUCE_QUANTIZATION": "NONE",
    }
    changed = {name for name, value in recipe.env.items() if launch.env[name] != value}
    assert changed == {"SGLANG_NUMA_BIND_V2"} and launch.env["SGLANG_NUMA_BIND_V2"] == "0"
    assert any("env.SGLANG_NUMA_BIND_V2=0 (published: env.SGLANG_NUMA_BIND_V2=1)" in str(n) for n in launch.notes)
    for name, value in added.items():
        assert any(note.found.startswith(f"env.{name}={value} (") for note in launch.notes)
    assert render(recipe, ["env.SGLANG_WARMUP_TIMEOUT=60"], machine=Machine()).env["SGLANG_WARMUP_TIMEOUT"] == "60"


def test_options_reach_the_engine(parsed: dict[str, dict]) -> None:
    assert parsed["eagle3-opt"]["values"]["disable_custom_all_reduce"] == "True"
    assert parsed["published all-reduce"]["values"]["disable_custom_all_reduce"] == "False"
    assert parsed["pinned"]["values"]["revision"] == repr("a" * 40)
    assert parsed["pinned"]["values"]["speculative_draft_model_revision"] == repr("b" * 40)


def test_every_limit_outlasts_a_cold_kernel_build(parsed: dict[str, dict]) -> None:
    cold_build_s = 633  # the longest that was reported for AITER
    for name in SERVED:
        assert float(parsed[name]["values"]["watchdog_timeout"]) > cold_build_s
        launch = render(load_recipe(name), machine=Machine())
        assert launch.recipe.options.progress_timeout_s > cold_build_s  # also how long the canary waits for an answer
        assert float(launch.env["SGLANG_WARMUP_TIMEOUT"]) > cold_build_s

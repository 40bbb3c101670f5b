"""The MI355X recipes: the published commands, their images, the sweep of the docs, and that vLLM knows every option."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.severity import Note, Severity
from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_eagle3.machine.hardware import GIB, Device, Machine
from kimi_w4a8_eagle3.recipe.launch import Launch, load_recipe, recipe_names, render
from kimi_w4a8_lab.speed import published

HERE = Path(__file__).parent
DOCS = (HERE.parents[1] / "docs" / "recipes.md").read_text()
# The command of the docs for one concurrency of the published sweep.
BENCH = shlex.split(DOCS[DOCS.index("    vllm bench serve") :].split("\n\n")[0].replace("\\\n", " "))
TABLE = json.loads((HERE / "vllm_options.json").read_text())
COMPAT = Path(sys.prefix) / "compat" / f"vllm-{TABLE['release']}"
NAMES = [name for name in recipe_names() if load_recipe(name).engine == "vllm"]

FP8 = "mi355x-kimi-mxfp4-eagle3-fp8"
BF16 = "mi355x-kimi-mxfp4-eagle3-bf16"
# The card's launch of the FP8 draft, as facts to compare with.
PUBLISHED = """
vllm serve amd/Kimi-K2.5-MXFP4 --port 8888 --tensor-parallel-size 4 --gpu-memory-utilization 0.90 --max-model-len 2304
--no-enable-prefix-caching --trust-remote-code --mm-encoder-tp-mode data --speculative-config
'{"model":"amd/kimi-k2.5-eagle3-fp8","method":"eagle3","num_speculative_tokens":6,"draft_tensor_parallel_size":1}'
"""
PUBLISHED_ENV = {
    "VLLM_ROCM_USE_AITER": "1",
    "VLLM_ROCM_USE_AITER_FP4_ASM_GEMM": "1",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "INT4",
    "VLLM_ROCM_USE_AITER_RMSNORM": "0",
}


def launch_of(name: str, *settings: str, extra: tuple[str, ...] = ()) -> Launch:
    return render(load_recipe(name), settings, extra, machine=Machine())


def options(argv: list[str]) -> dict[str, list[str]]:
    """`--name` -> its values, of a command whose other words come first."""
    found: dict[str, list[str]] = {}
    for word in argv:
        if word.startswith("--"):
            found[word[2:]] = []
        elif found:
            found[list(found)[-1]].append(word)
    return found


def test_the_fp8_recipe_is_the_published_command_and_environment() -> None:
    published, ours = shlex.split(PUBLISHED), launch_of(FP8)
    assert ours.argv[:3] == published[:3] == ["vllm", "serve", "amd/Kimi-K2.5-MXFP4"]
    expected = options(published)
    expected |= {"gpu-memory-utilization": ["0.9"], "host": ["127.0.0.1"]}
    assert options(ours.argv) == expected
    assert ours.env == PUBLISHED_ENV
    assert (ours.draft, ours.tensor_parallel, ours.base_url) == ("amd/kimi-k2.5-eagle3-fp8", 4, "http://127.0.0.1:8888")


def test_the_bf16_recipe_differs_in_draft_image_and_length() -> None:
    fp8, bf16 = launch_of(FP8), launch_of(BF16)
    changed = {name: value for name, value in options(bf16.argv).items() if options(fp8.argv).get(name) != value}
    assert set(changed) == {"max-model-len", "speculative-config"}
    assert changed["max-model-len"] == ["2248"] and bf16.draft == "lightseekorg/kimi-k2.5-eagle3"
    assert bf16.recipe.image == "vllm/vllm-openai-rocm:v0.19.0"
    assert fp8.recipe.image == "vllm/vllm-openai-rocm:nightly-fb1ac806c55a6dc96fe92261b80c8550e9c39d2f"


@pytest.mark.parametrize("name", ["mi355x-kimi-mxfp4", "mi355x-minimax-m2.5"])
def test_the_base_recipes_do_not_speculate(name: str) -> None:
    assert "speculative-config" not in options(launch_of(name).argv) and launch_of(name).draft is None
    speculating = load_recipe(f"{name}-eagle3-bf16:plain")
    assert options(render(speculating, machine=Machine()).argv) == options(launch_of(name).argv)


def test_minimax_is_expert_parallel_with_three_draft_tokens() -> None:
    found = options(launch_of("mi355x-minimax-m2.5-eagle3-bf16").argv)
    assert found["enable-expert-parallel"] == [] and found["tensor-parallel-size"] == ["4"]
    table = json.loads(found["speculative-config"][0])
    assert (table["num_speculative_tokens"], table["draft_tensor_parallel_size"]) == (3, 1)
    notes = launch_of("mi355x-minimax-m2.5").notes
    assert sum("not in the published command" in note.text for note in notes) == 5  # it has no published one


@pytest.mark.parametrize("name", NAMES)
def test_every_option_is_one_that_vllm_knows(name: str) -> None:
    launch = launch_of(name, "disable-custom-all-reduce=true", f"model.revision={'a' * 40}")
    check(options(launch.argv[3:]), TABLE["serve"])


def test_every_option_of_the_documented_sweep_is_one_that_vllm_knows() -> None:
    check(options(BENCH[3:]), TABLE["bench serve"])


def check(found: dict[str, list[str]], known: dict[str, Any]) -> None:
    for name, values in found.items():
        kind = known[name]
        if kind == "flag":
            assert values == [], name
            continue
        (value,) = values
        if isinstance(kind, list):
            assert value in kind, name
        else:
            {"int": int, "float": float, "text": str, "json": json.loads}[kind](value)


@pytest.fixture(scope="module")
def parsed() -> dict[str, dict]:
    if not COMPAT.is_dir():
        pytest.skip(f"vLLM {TABLE['release']} is not in {COMPAT} (docs/recipes.md); its option table was used")
    commands = {name: launch_of(name).argv for name in NAMES}
    commands["bench"] = BENCH
    commands["published bench"] = [*BENCH, "--use-chat-template"]  # as printed
    commands["misspelt"] = [*launch_of(FP8).argv, "--max-modl-len", "1"]
    environment = {**os.environ, "PYTHONPATH": str(COMPAT), "OMP_NUM_THREADS": "1", "VLLM_PLUGINS": ""}
    done = subprocess.run(
        [sys.executable, str(HERE / "vllm_parser.py")],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_vllms_own_parser_accepts_every_command(parsed: dict[str, dict]) -> None:
    for name in [*NAMES, "bench"]:
        assert parsed[name].get("unknown") == [], (name, parsed[name])
    values = parsed[FP8]["values"]
    assert values["model_tag"] == "'amd/Kimi-K2.5-MXFP4'" and values["enable_prefix_caching"] == "False"
    assert "'num_speculative_tokens': 6" in values["speculative_config"]


def test_vllms_parser_refuses_mistakes_and_the_bench_command_as_printed(parsed: dict[str, dict]) -> None:
    assert parsed["misspelt"]["unknown"] == ["--max-modl-len", "1"]
    assert parsed["published bench"]["unknown"] == ["--use-chat-template"]


def test_the_documented_sweep_asks_for_lengths_that_fit_the_model_length() -> None:
    found = options(BENCH)
    middle, ratio = int(found["random-input-len"][0]), float(found["random-range-ratio"][0])
    low, high = int(middle * (1 - ratio)), -int(-middle * (1 + ratio) // 1)  # as vLLM rounds: floor and ceiling
    assert 0.8 * 1024 - 1 <= low <= 0.8 * 1024 + 1 and 1023 <= high <= 1024
    assert found["random-output-len"] == found["random-input-len"] and 2 * high < 2248


def test_published_figures_give_the_published_speedups() -> None:
    def speedups(name: str, base: str) -> list[float]:
        rates = published.load("mi355x-vllm-eagle3")["tok_s_per_gpu"]
        return [rate / rates[base][concurrency] for concurrency, rate in rates[name].items()]

    printed = {BF16: "1.90 1.89 1.81 1.83 1.69", FP8: "2.00 1.90 1.87 1.85 1.76"}
    for name, ratios in printed.items():
        assert [f"{ratio:.2f}" for ratio in speedups(name, "mi355x-kimi-mxfp4")] == ratios.split()
    minimax = speedups("mi355x-minimax-m2.5-eagle3-bf16", "mi355x-minimax-m2.5")
    # 436.9 / 282.7 = 1.545, which the article rounds to 1.55.
    assert [round(ratio, 2) for ratio in minimax] == pytest.approx([1.79, 1.71, 1.55, 1.57, 1.38], abs=0.006)


def test_speculation_can_be_changed_by_key_and_as_json() -> None:
    by_key = launch_of(FP8, "args.speculative-config.num_speculative_tokens=4")
    assert json.loads(options(by_key.argv)["speculative-config"][0])["num_speculative_tokens"] == 4
    assert by_key.draft == "amd/kimi-k2.5-eagle3-fp8"
    typed = launch_of(FP8, extra=("--speculative-config", '{"method":"ngram","num_speculative_tokens":2}', "-tp", "8"))
    table = json.loads(options(typed.argv)["speculative-config"][0])
    assert table["method"] == "ngram" and typed.tensor_parallel == 8
    with pytest.raises(KimiError, match="cannot read --speculative-config"):
        launch_of(FP8, extra=("--speculative-config", "{method"))


def test_a_local_draft_and_a_pinned_one_reach_the_speculation() -> None:
    local = launch_of(FP8, "draft.repo=/models/fp8")
    assert local.draft == "/models/fp8"
    pinned = launch_of(FP8, f"draft.revision={'b' * 40}")
    assert json.loads(options(pinned.argv)["speculative-config"][0])["revision"] == "b" * 40
    assert sum("moving revision" in note.text for note in pinned.notes) == 1


def docker(name: str) -> str:
    done = CliRunner().invoke(app, ["serve", "-r", name, "--dry-run", "--docker"])
    assert done.exit_code == 0, done.exception
    return done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_the_container_runs_the_same_command_in_the_right_image(name: str, tmp_path: Path) -> None:
    """The printed line goes through a real shell; a `docker` on PATH writes down what it was given."""
    launch = launch_of(name)
    program = tmp_path / "docker"
    program.write_text(f"#!{shutil.which('sh')}\nfor word; do printf '%s\\n' \"$word\"; done\n")
    program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": "/home/somebody"}
    done = subprocess.run(["sh", "-c", docker(name)], env=environment, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    at = words.index(str(launch.recipe.image))
    assert words[at - 2 : at] == ["--entrypoint", "vllm"] and words[at + 1 :] == launch.argv[1:]
    assert {f"{key}={value}" for key, value in launch.env.items()} <= set(words[:at])
    assert {"/dev/kfd", "/dev/dri", "/home/somebody/.cache/huggingface:/models"} <= set(words[:at])


def test_the_dry_run_shows_command_and_container() -> None:
    done = CliRunner().invoke(app, ["serve", "-r", FP8, "--dry-run"])
    assert "vllm serve amd/Kimi-K2.5-MXFP4 \\\n" in done.stdout and "docker" not in done.stdout
    assert "docker run" in done.stderr
    as_json = json.loads(CliRunner().invoke(app, ["serve", "-r", FP8, "--dry-run", "--json"]).stdout)
    assert as_json["engine"] == "vllm" and as_json["image"].endswith("d2f") and "docker run" in as_json["docker"]
    refused = CliRunner().invoke(app, ["serve", "-r", "eagle3", "--dry-run", "--docker"])
    assert "names no image" in str(refused.exception)


def test_an_mi355x_meets_the_recipe_and_an_mi325x_does_not() -> None:
    mi355x = Machine(tuple(Device("gfx950", 256, "p", 0, 288 * GIB) for _ in range(4)))
    mi325x = Machine(tuple(Device("gfx942", 304, "p", 0, 256 * GIB) for _ in range(8)))
    assert not any("GPU" in note.text for note in render(load_recipe(FP8), machine=mi355x).notes)
    notes = render(load_recipe(FP8), machine=mi325x).notes
    assert Note("the GPUs are gfx942, the recipe is made for gfx950", Severity.WARN) in notes

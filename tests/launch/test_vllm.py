"""launch/vllm.sh: the published commands, their images, the sweep of the docs, and that vLLM knows every option."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from support.repository import ROOT

from kimi_w4a8_lab.speed import published

SCRIPT = ROOT / "launch/vllm.sh"
DOCS = (ROOT / "docs/recipes.md").read_text()
# The command of the docs for one concurrency of the published sweep.
BENCH = shlex.split(DOCS[DOCS.index("    vllm bench serve") :].split("\n\n")[0].replace("\\\n", " "))
TABLE = json.loads(Path(__file__).with_name("vllm_options.json").read_text())  # read from the parser of vLLM 0.19.0
KIMI, MINIMAX = "mi355x-kimi-mxfp4", "mi355x-minimax-m2.5"
BF16, FP8 = f"{KIMI}-eagle3-bf16", f"{KIMI}-eagle3-fp8"
NAMES = [KIMI, BF16, FP8, MINIMAX, f"{MINIMAX}-eagle3-bf16"]
TAGS = ["v0.19.0", "v0.19.0", "nightly-fb1ac806c55a6dc96fe92261b80c8550e9c39d2f"]
TAGS += ["nightly-4eafc729285e459a5fc96efd6f7b313b155cad48"] * 2

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


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a `vllm` and a `docker` that print their words and the variables of vLLM."""
    folder = tmp_path_factory.mktemp("programs")
    for name in ("vllm", "docker"):
        text = "#!/usr/bin/env python3\nimport json, os, sys\n"
        text += "env = {name: value for name, value in os.environ.items() if name.startswith('VLLM_')}\n"
        text += f"print(json.dumps([[{name!r}, *sys.argv[1:]], env]))\n"
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def run(*words: str, programs: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": "/home/somebody"}
    return subprocess.run([SCRIPT, *words], env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def commands(programs: Path) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Name -> words and environment with which the script starts vLLM here."""
    return {name: tuple(json.loads(run("--here", name, programs=programs).stdout)) for name in NAMES}


def options(argv: list[str]) -> dict[str, list[str]]:
    """`--name` -> its values, of a command whose other words come first."""
    found: dict[str, list[str]] = {}
    for word in argv:
        if word.startswith("--"):
            found[word[2:]] = []
        elif found:
            found[list(found)[-1]].append(word)
    return found


def test_the_fp8_draft_has_the_published_command_and_the_bf16_draft_another_length(commands) -> None:
    published_words, (words, environment) = shlex.split(PUBLISHED), commands[FP8]
    assert words[:3] == published_words[:3] == ["vllm", "serve", "amd/Kimi-K2.5-MXFP4"]
    fp8, bf16 = options(words), options(commands[BF16][0])
    assert fp8 == options(published_words) | {"host": ["127.0.0.1"]}
    assert environment == commands[BF16][1] == PUBLISHED_ENV
    changed = {name: value for name, value in bf16.items() if fp8.get(name) != value}
    assert set(changed) == {"max-model-len", "speculative-config"} and changed["max-model-len"] == ["2248"]
    assert json.loads(changed["speculative-config"][0])["model"] == "lightseekorg/kimi-k2.5-eagle3"


def test_the_baselines_differ_by_their_draft_alone_and_minimax_is_expert_parallel(commands) -> None:
    for base in (KIMI, MINIMAX):
        plain, drafted = (options(commands[name][0]) for name in (base, f"{base}-eagle3-bf16"))
        table = json.loads(drafted.pop("speculative-config")[0])
        assert drafted == plain and "speculative-config" not in plain
    assert drafted["enable-expert-parallel"] == [] and drafted["tensor-parallel-size"] == ["4"]
    assert (table["num_speculative_tokens"], table["draft_tensor_parallel_size"]) == (3, 1)
    assert commands[MINIMAX][1].items() < PUBLISHED_ENV.items() and len(commands[MINIMAX][1]) == 2


@pytest.mark.parametrize("name", [*NAMES, "bench"])
def test_every_option_is_one_that_vllm_knows(name: str, commands) -> None:
    """Of the commands, and of the documented sweep."""
    known = TABLE["bench serve" if name == "bench" else "serve"]
    for option, values in options((BENCH if name == "bench" else commands[name][0])[3:]).items():
        kind = known[option]
        assert len(values) == (kind != "flag"), option
        if isinstance(kind, list):
            assert values[0] in kind, option
        elif kind != "flag":
            {"int": int, "float": float, "text": str, "json": json.loads}[kind](values[0])


@pytest.mark.parametrize(("name", "tag"), zip(NAMES, TAGS, strict=True))
def test_the_container_runs_the_same_command_in_the_right_image(name: str, tag: str, commands, programs: Path) -> None:
    words, _ = json.loads(run(name, "--port", "9", programs=programs).stdout)
    at = words.index(f"vllm/vllm-openai-rocm:{tag}")
    assert words[at - 2 : at] == ["--entrypoint", "vllm"] and words[at + 1 :] == [*commands[name][0][1:], "--port", "9"]
    assert {f"--env={key}={value}" for key, value in commands[name][1].items()} <= set(words[:at])
    assert {"/dev/kfd", "/dev/dri", "/home/somebody/.cache/huggingface:/models"} <= set(words[:at])


def test_another_name_ends_with_the_names_that_exist(programs: Path) -> None:
    for words in ((), ("--here",), ("mi355x-kimi",), ("--port", "1")):
        done = run(*words, programs=programs)
        assert (done.returncode, done.stdout) == (2, "") and all(name in done.stderr for name in NAMES)


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
        assert [f"{ratio:.2f}" for ratio in speedups(name, KIMI)] == ratios.split()
    minimax = speedups(f"{MINIMAX}-eagle3-bf16", MINIMAX)
    # 436.9 / 282.7 = 1.545, which the article rounds to 1.55.
    assert [round(ratio, 2) for ratio in minimax] == pytest.approx([1.79, 1.71, 1.55, 1.57, 1.38], abs=0.006)

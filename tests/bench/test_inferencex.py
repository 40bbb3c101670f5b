"""The InferenceX export: the entry obeys the rules, results carry the suite's names, the rest is in the side-car."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from typer.testing import CliRunner

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.run_dir import RECORD
from kimi_w4a8_eagle3.bench.generator import LoadResult
from kimi_w4a8_eagle3.bench.inferencex import MasterEntry, entry
from kimi_w4a8_eagle3.bench.measure import Measurement
from kimi_w4a8_eagle3.bench.runs import RunResult
from kimi_w4a8_eagle3.bench.workloads import load_workload
from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_eagle3.engine.metrics import Acceptance
from kimi_w4a8_eagle3.machine.hardware import Machine
from kimi_w4a8_eagle3.recipe.launch import load_recipe, render

STATISTICS = ("mean", "median", "std", "p90", "p95", "p99")


def raw_line(**changes: Any) -> dict[str, Any]:
    """What SGLang's generator writes, with its own names and a list that must not be exported."""
    latencies = {f"{s}_{kind}_ms": 10.0 for s in STATISTICS for kind in ("ttft", "tpot", "itl", "e2e_latency")}
    return {
        "backend": "sglang",
        "max_concurrency": 40,
        "duration": 2.5,
        "completed": 80,
        "total_input_tokens": 1000,
        "total_output_tokens": 500,
        "request_throughput": 1.0,
        "output_throughput": 200.0,
        "total_throughput": 600.0,
        "itls": [[0.1, 0.2]],
        **latencies,
        **changes,
    }


def write_run(folder: Path, side: str = "eagle3-opt", problems: tuple[str, ...] = (), **changes: Any) -> Path:
    folder.mkdir()
    measurements = []
    for concurrency in (40, 2):
        raw = raw_line(max_concurrency=concurrency, **changes)
        name = f"raw-{concurrency}.jsonl"
        (folder / name).write_text(json.dumps(raw) + "\n")
        measurements.append(
            Measurement(
                side=side,
                workload=load_workload("con40"),
                concurrency=concurrency,
                num_prompts=2 * concurrency,
                seed=42,
                started="2026-11-21T03:00:00+00:00",
                raw=name,
                command=[],
                load=LoadResult.model_validate(raw),
                acceptance=Acceptance(length=3.2, rate=0.73, steps=100),
                problems=list(problems),
            )
        )
    result = RunResult(kind="bench", status="complete", sides=[side], measurements=measurements)
    (folder / "result.json").write_text(result.model_dump_json())
    (folder / RECORD).write_text(json.dumps({"servers": {side: {"argv": ["x"], "env": {}}}}))
    return folder


def export(folder: Path):
    return CliRunner().invoke(app, ["bench", "export-inferencex", str(folder)])


def test_a_run_becomes_an_entry_results_and_a_side_car(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", std_tpot_ms=0.0)
    done = export(run)
    assert done.exit_code == 0, done.exception
    out = run / "inferencex"
    assert len(list(out.iterdir())) == 4 and not list(run.glob(".*"))
    content = yaml.safe_load((out / "eagle3-opt.yaml").read_text())
    ((key, made),) = content.items()
    assert key == "kimik2.5-int4-mi325x-sglang"
    MasterEntry.model_validate(made)
    assert made["scenarios"]["fixed-seq-len"] == [
        {
            "isl": 10240,
            "osl": 512,
            "search-space": [{"tp": 8, "ep": 1, "spec-decoding": "mtp", "conc-list": [2, 40]}],
        }
    ]
    result = json.loads((out / "eagle3-opt_isl10240_osl512_conc40_seed42_r0.json").read_text())
    assert result["model_id"] == "amd/Kimi-K2.5-W4A8" and result["total_token_throughput"] == 600.0
    assert result["mean_e2el_ms"] == 10.0 and "mean_e2e_latency_ms" not in result and "itls" not in result
    assert "std_tpot_ms" not in result and result["std_ttft_ms"] == 10.0  # 1000 / 0 would end the processing
    assert result["benchmark_end_time_unix"] - result["benchmark_start_time_unix"] == 2.5
    side_car = json.loads((out / "eagle3-opt.sidecar.json").read_text())
    first = side_car["results"][0]
    assert (first["spec_algorithm"], first["draft"]) == ("EAGLE3", "lightseekorg/kimi-k2.5-eagle3")
    assert first["accept_length"] == 3.2 and first["environment"]["SPEC_DECODING"] == "mtp"
    assert "prompts went without the chat template" in first["differs"]


@pytest.mark.parametrize("method", ["eagle3", "eagle3_fp8", "EAGLE3"])
def test_the_schema_refuses_what_inferencex_refuses(method: str) -> None:
    made = entry(load_recipe("eagle3"), {(1024, 1024): [4]}).model_dump(by_alias=True)
    made["scenarios"]["fixed-seq-len"][0]["search-space"][0]["spec-decoding"] = method
    with pytest.raises(ValidationError):
        MasterEntry.model_validate(made)
    with pytest.raises(ValidationError):
        MasterEntry.model_validate(entry(load_recipe("w4a8"), {(1024, 1024): [4]}).model_dump(by_alias=True) | {"x": 1})


def test_the_vllm_recipes_have_entries_too() -> None:
    made = entry(load_recipe("mi355x-minimax-m2.5-eagle3-bf16"), {(1024, 1024): [64, 4, 4]})
    assert (made.model_prefix, made.precision, made.runner, made.framework) == ("minimaxm2.5", "fp8", "mi355x", "vllm")
    (point,) = made.scenarios.fixed_seq_len[0].search_space
    assert (point.tp, point.ep, point.conc_list) == (4, 4, [4, 64])
    assert (
        entry(load_recipe("w4a8"), {(1024, 1024): [4]}).scenarios.fixed_seq_len[0].search_space[0].spec_decoding
        == "none"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"problems": ("2 requests failed",)}, "no usable measurement"),
        ({"side": "tiny"}, "InferenceX has no name for builtin:tiny"),
    ],
)
def test_what_cannot_be_expressed_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    run = write_run(tmp_path / "run", **changes)
    assert message in str(export(run).exception)
    assert not (run / "inferencex").exists() and not list(run.glob(".*"))


def test_an_export_is_not_overwritten(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert export(run).exit_code == 0
    assert "the destination exists" in str(export(run).exception)


def test_a_fixed_accept_length_is_an_option_with_a_warning() -> None:
    launch = render(load_recipe("eagle3-opt"), ["options.golden_acceptance=2.88"], machine=Machine())
    simulated = {name: value for name, value in launch.env.items() if "SIMULATE" in name}
    assert simulated == {
        "SGLANG_SIMULATE_ACC_LEN": "2.88",
        "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
        "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
    }
    assert any("the texts are not the model's" in note for note in launch.notes)
    assert not any("SIMULATE" in name for name in render(load_recipe("eagle3-opt"), machine=Machine()).env)


@pytest.mark.parametrize(
    ("recipe", "length"), [("w4a8", "2"), ("eagle3", "4.5"), ("mi355x-kimi-mxfp4-eagle3-fp8", "2")]
)
def test_a_fixed_accept_length_must_fit(recipe: str, length: str) -> None:
    with pytest.raises(KimiError, match="does not fit"):
        render(load_recipe(recipe), [f"options.golden_acceptance={length}"], machine=Machine())

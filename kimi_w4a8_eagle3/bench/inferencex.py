"""Export a benchmark run for comparison with InferenceX: a master-config entry, result files, a side-car.

Rules as read at commit 843c6254 (2026-08-22). The suite retired Kimi-K2.5 in August 2026 and does not take engines that
are changed by hooks without a waiver, so an export compares, it cannot be submitted.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..base.errors import KimiError
from ..base.run_dir import write_json
from ..doctor.software import SGLANG_PINNED
from ..recipe.launch import Recipe, load_recipe, resolve
from .generator import last_json_line
from .measure import Measurement
from .runs import Run

READ_AT = "843c6254 (2026-08-22)"
# Repository -> InferenceX's model prefix and precision; its dashboard knows the model by the prefix.
MODELS = {
    "amd/Kimi-K2.5-W4A8": ("kimik2.5", "int4"),
    "amd/Kimi-K2.5-MXFP4": ("kimik2.5", "fp4"),
    "MiniMaxAI/MiniMax-M2.5": ("minimaxm2.5", "fp8"),
}
SGLANG_IMAGE = f"lmsysorg/sglang-rocm:v{SGLANG_PINNED}-rocm724-mi30x-20260919"
_NAMES = {"total_throughput": "total_token_throughput"}
_NEEDED = ("max_concurrency", "completed", "total_input_tokens", "total_output_tokens", "output_throughput")


class _Entry(BaseModel):
    """InferenceX forbids keys that it does not know, and writes them with dashes."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class SearchPoint(_Entry):
    """One parallel layout and its concurrencies. `eagle3` is no value there: entries with EAGLE3 say `mtp`."""

    tp: int = Field(gt=0)
    ep: int = Field(default=1, gt=0)
    spec_decoding: Literal["mtp", "draft_model", "none"] = Field(alias="spec-decoding")
    conc_list: list[int] = Field(alias="conc-list", min_length=1)


class FixedLength(_Entry):
    """One input and output length."""

    isl: int = Field(gt=0)
    osl: int = Field(gt=0)
    search_space: list[SearchPoint] = Field(alias="search-space", min_length=1)


class Scenarios(_Entry):
    """Only fixed lengths are exported."""

    fixed_seq_len: list[FixedLength] = Field(alias="fixed-seq-len", min_length=1)


class MasterEntry(_Entry):
    """One entry of a master configuration."""

    image: str
    model: str
    model_prefix: str = Field(alias="model-prefix")
    runner: Literal["mi300x", "mi325x", "mi355x"]
    precision: Literal["fp4", "fp8", "int4", "bf16"]
    framework: Literal["sglang", "vllm"]
    multinode: Literal[False] = False
    scenarios: Scenarios


def export(run: Run, destination: Path) -> list[Path]:
    """Write entry, results and side-car of every recipe measured in `run` into the new folder `destination`.

    Raises KimiError when nothing in the run can be expressed: no usable measurement of a fixed input length, or a
    recipe whose model InferenceX does not name.
    """
    if destination.exists():
        raise KimiError("the destination exists", str(destination), remedy="name a new folder")
    usable = [each for each in run.usable if each.workload.input_len is not None]
    if not usable:
        raise KimiError(
            "no usable measurement of a fixed input length",
            str(run.folder),
            "a run of con2, con40 or another random text",
        )
    files: dict[str, Any] = {}
    for side in dict.fromkeys(each.side for each in usable):
        files |= _side(run, load_recipe(side), [each for each in usable if each.side == side])
    scratch = destination.with_name(f".{destination.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    for name, content in files.items():
        if isinstance(content, str):
            (scratch / name).write_text(content)
        else:
            write_json(scratch / name, content)
    scratch.rename(destination)
    return [destination / name for name in files]


def entry(recipe: Recipe, lengths: Mapping[tuple[int, int], Sequence[int]]) -> MasterEntry:
    """The master-config entry of a recipe. lengths: (input, output) tokens -> concurrencies."""
    prefix, precision = _names(recipe)
    tp, ep = parallel(recipe)
    scenarios = [
        {
            "isl": isl,
            "osl": osl,
            "search-space": [
                {"tp": tp, "ep": ep, "spec-decoding": _method(recipe), "conc-list": sorted(set(concurrency))}
            ],
        }
        for (isl, osl), concurrency in lengths.items()
    ]
    return MasterEntry.model_validate(
        {
            "image": recipe.image or SGLANG_IMAGE,
            "model": recipe.model.repo,
            "model-prefix": prefix,
            "runner": recipe.hardware.reference,
            "precision": precision,
            "framework": recipe.engine,
            "scenarios": {"fixed-seq-len": scenarios},
        }
    )


def result(raw: Mapping[str, Any], model: str, started: datetime) -> dict[str, Any]:
    """SGLang's result by InferenceX's names, without lists.

    Its processing inverts everything called tpot, so a spread of zero is left out.
    """
    renamed: dict[str, Any] = {"model_id": model}
    for name, value in raw.items():
        name = _NAMES.get(name, name.replace("_e2e_latency_ms", "_e2el_ms"))
        if isinstance(value, int | float | str) and not ("tpot" in name and value == 0):
            renamed[name] = value
    missing = [
        name for name in (*_NEEDED, "total_token_throughput", "mean_tpot_ms", "mean_e2el_ms") if name not in renamed
    ]
    if missing:
        raise KimiError(
            f"the measurement lacks {', '.join(missing)}", "result", "the output of SGLang's load generator"
        )
    begin = started.timestamp()
    return renamed | {"benchmark_start_time_unix": begin, "benchmark_end_time_unix": begin + float(raw["duration"])}


def parallel(recipe: Recipe) -> tuple[int, int]:
    """Tensor- and expert-parallel size of a recipe."""
    args = resolve(recipe).args
    tp = int(str(args.get("tp-size", args.get("tensor-parallel-size", 1))))
    return tp, tp if args.get("enable-expert-parallel") else 1


def _names(recipe: Recipe) -> tuple[str, str]:
    """InferenceX's model prefix and precision."""
    if recipe.model.repo not in MODELS or recipe.hardware.reference is None:
        raise KimiError(f"InferenceX has no name for {recipe.model.repo}", recipe.name, "one of " + ", ".join(MODELS))
    return MODELS[recipe.model.repo]


def _method(recipe: Recipe) -> Literal["mtp", "none"]:
    return "none" if recipe.draft is None else "mtp"


def _side(run: Run, recipe: Recipe, measurements: list[Measurement]) -> dict[str, Any]:
    lengths: dict[tuple[int, int], list[int]] = {}
    results, notes = {}, []
    for each in measurements:
        isl, osl = int(each.workload.input_len or 0), each.workload.output_len
        lengths.setdefault((isl, osl), []).append(each.concurrency)
        stem = f"{recipe.name}_isl{isl}_osl{osl}_conc{each.concurrency}_seed{each.seed}_r{each.repetition_index}"
        started = datetime.fromisoformat(each.started)
        results[f"{stem}.json"] = result(json.loads(last_json_line(run.folder / each.raw)), recipe.model.repo, started)
        notes.append(_sidecar(recipe, each, f"{stem}.json"))
    made = entry(recipe, lengths)
    return {
        f"{recipe.name}.yaml": _yaml({_key(made): made.model_dump(by_alias=True)}),
        f"{recipe.name}.sidecar.json": {
            "rules_read_at": READ_AT,
            "not_submittable": "the suite retired Kimi-K2.5 in August 2026; hooks into the engine need a waiver",
            "servers": run.record.get("servers", {}),
            "results": notes,
        },
        **results,
    }


def _sidecar(recipe: Recipe, each: Measurement, name: str) -> dict[str, Any]:
    """What InferenceX has no field for, and the environment in which its processing reads the result."""
    isl, osl = each.workload.input_len, each.workload.output_len
    prefix, precision = _names(recipe)
    tp, ep = parallel(recipe)
    environment = {
        "RUNNER_TYPE": recipe.hardware.reference,
        "FRAMEWORK": recipe.engine,
        "PRECISION": precision,
        "SPEC_DECODING": _method(recipe),
        "RESULT_FILENAME": name.removesuffix(".json"),
        "ISL": str(isl),
        "OSL": str(osl),
        "DISAGG": "false",
        "MODEL_PREFIX": prefix,
        "IMAGE": recipe.image or SGLANG_IMAGE,
        "TP": str(tp),
        "EP_SIZE": str(ep),
        "DP_ATTENTION": "false",
    }
    return {
        "file": name,
        "environment": environment,
        "spec_algorithm": None if recipe.draft is None else "EAGLE3",
        "draft": None if recipe.draft is None else recipe.draft.repo,
        "accept_length": None if each.acceptance is None else each.acceptance.length,
        "differs": _differences(each),
    }


def _differences(each: Measurement) -> list[str]:
    """How the workload departs from InferenceX's own protocol."""
    work = each.workload
    rules = {
        "lengths are not drawn from 0.8 to 1 times the target": work.range_ratio != 0.8,
        "prompts went without the chat template": not work.chat_template,
        "not 10 prompts a stream": each.num_prompts != 10 * each.concurrency,
        "lengths other than 1024/1024, 8192/1024": (work.input_len, work.output_len)
        not in ((1024, 1024), (8192, 1024)),
    }
    return [text for text, departs in rules.items() if departs]


def _key(made: MasterEntry) -> str:
    return f"{made.model_prefix}-{made.precision}-{made.runner}-{made.framework}"


def _yaml(content: Mapping[str, Any]) -> str:
    """JSON is YAML."""
    return json.dumps(content, indent=2) + "\n"

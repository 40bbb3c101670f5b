"""Results of a sweep in the form of InferenceX: a configuration entry for each side, its results, and a side-car.

The entries follow the rules of InferenceX's own matrix validation, each read at a named commit:

- `main` at 843c6254 (2026-08-22) knows no value for EAGLE3. Its entries with EAGLE3 say `mtp`.
- The branches of the article (pull requests 1116 and 1439, closed in May 2026) add `eagle3` and `eagle3_fp8`:
  bf030960 (2026-06-01) and 26a2b156 (2026-05-19).

The suite retired Kimi-K2.5 in August 2026, so the files serve comparison and cannot be submitted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from kimi_w4a8_eagle3.base.run_dir import write_json
from kimi_w4a8_eagle3.recipe.launch import Recipe, load_recipe, resolve

from .generator import last_json_line
from .measure import Measurement
from .runs import Run

FOLDER = "inferencex"
_MAIN = "843c6254"
_BRANCHES = {"none": _MAIN, "eagle3": "bf030960", "eagle3_fp8": "26a2b156"}
_ON_MAIN = {"none": "none", "eagle3": "mtp", "eagle3_fp8": "mtp"}
_RETIRED = "the suite retired Kimi-K2.5 in August 2026, and an engine that hooks change needs a waiver"
# Repository -> InferenceX's prefix and precision. The built-in model is not in its list.
_MODELS = {
    "amd/Kimi-K2.5-W4A8": ("kimik2.5", "int4"),
    "moonshotai/Kimi-K2.5": ("kimik2.5", "int4"),
    "amd/Kimi-K2.5-MXFP4": ("kimik2.5", "fp4"),
    "MiniMaxAI/MiniMax-M2.5": ("minimaxm2.5", "fp8"),
    "builtin:tiny": ("kimik2.5-tiny", "int4"),
}
_NAMES = {"total_throughput": "total_token_throughput"}


def export(run: Run) -> Path | None:
    """Write the files of every recipe in `run` to its folder `inferencex`; None if nothing has a fixed input length."""
    targets = run.record["targets"]
    folder, by_side = run.folder / FOLDER, dict[str, list[Measurement]]()
    for found in run.usable:
        if found.workload.input_len is not None:
            by_side.setdefault(found.side, []).append(found)
    for side, measurements in by_side.items():
        folder.mkdir(exist_ok=True)
        served = resolve(load_recipe(targets[side]["recipe"]), targets[side]["settings"])
        for name, content in _files(run, served.recipe, measurements).items():
            write_json(folder / name, content)  # JSON is YAML
    return folder if by_side else None


def entry(recipe: Recipe, lengths: Mapping[tuple[int, int], Sequence[int]], method: str) -> dict[str, Any]:
    """Return the entry of a recipe in a master configuration for one node, which may have no other keys.

    lengths: (input, output) tokens -> concurrencies, of which InferenceX takes a range, too. method: `spec-decoding`.
    """
    prefix, precision = _names(recipe)
    tp, ep, dp_attention = _parallel(recipe)
    layout: dict[str, Any] = {"tp": tp, "ep": ep, "dp-attn": dp_attention, "spec-decoding": method}
    shapes = [
        {"isl": isl, "osl": osl, "search-space": [{**layout, "conc-list": sorted(set(concurrency))}]}
        for (isl, osl), concurrency in lengths.items()
    ]
    return {
        "image": "built by Dockerfile",
        "model": recipe.model.repo,
        "model-prefix": prefix,
        "runner": recipe.hardware.reference or "cpu",
        "precision": precision,
        "framework": "sglang",
        "multinode": False,
        "scenarios": {"fixed-seq-len": shapes},
    }


def method_of(recipe: Recipe) -> str:
    """Return the article's name of the recipe's speculation."""
    if recipe.draft is None or recipe.options.speculation == "off":
        return "none"
    return "eagle3_fp8" if "fp8" in recipe.draft.repo.lower() else "eagle3"


def result(raw: Mapping[str, Any], model: str, started: datetime) -> dict[str, Any]:
    """Return the generator's result by InferenceX's names, without lists.

    InferenceX inverts every figure with `tpot` in its name, so a spread of zero is left out.
    """
    renamed: dict[str, Any] = {"model_id": model}
    for name, value in raw.items():
        name = _NAMES.get(name, name.replace("_e2e_latency_ms", "_e2el_ms"))
        if isinstance(value, int | float | str) and not ("tpot" in name and value == 0):
            renamed[name] = value
    begin = started.timestamp()
    return renamed | {"benchmark_start_time_unix": begin, "benchmark_end_time_unix": begin + float(raw["duration"])}


def _files(run: Run, recipe: Recipe, measurements: Sequence[Measurement]) -> dict[str, Any]:
    """Return the content of each file of one recipe by name."""
    stem, method = recipe.name.replace(":", "-"), method_of(recipe)
    lengths, notes, files = dict[tuple[int, int], list[int]](), [], dict[str, Any]()
    for found in measurements:
        isl, osl = int(found.workload.input_len or 0), found.workload.output_len
        lengths.setdefault((isl, osl), []).append(found.concurrency)
        name = f"{stem}_isl{isl}_osl{osl}_conc{found.concurrency}_seed{found.seed}_r{found.repetition_index}"
        raw = json.loads(last_json_line(run.folder / found.raw))
        files[f"{name}.json"] = result(raw, recipe.model.repo, datetime.fromisoformat(found.started))
        notes.append(_sidecar(recipe, found, name))
    prefix, precision = _names(recipe)
    key = "-".join([prefix, precision, recipe.hardware.reference or "cpu", "sglang"])
    key += "" if method == "none" else f"-{method.replace('_', '-')}"
    for suffix, value in (("", method), (".main", _ON_MAIN[method])):
        files[f"{stem}{suffix}.yaml"] = {key: entry(recipe, lengths, value)}
    rules = {f"{stem}.yaml": _BRANCHES[method], f"{stem}.main.yaml": _MAIN}
    return files | {f"{stem}.sidecar.json": {"rules_of_commit": rules, "not_submittable": _RETIRED, "results": notes}}


def _sidecar(recipe: Recipe, found: Measurement, name: str) -> dict[str, Any]:
    """Return the environment in which InferenceX's processing reads a result, and what it has no field for."""
    prefix, precision = _names(recipe)
    tp, ep, dp_attention = _parallel(recipe)
    environment = {
        "RUNNER_TYPE": recipe.hardware.reference or "cpu",
        "FRAMEWORK": "sglang",
        "PRECISION": precision,
        "SPEC_DECODING": method_of(recipe),
        "RESULT_FILENAME": name,
        "ISL": str(found.workload.input_len),
        "OSL": str(found.workload.output_len),
        "DISAGG": "false",
        "MODEL_PREFIX": prefix,
        "IMAGE": "built by Dockerfile",
        "TP": str(tp),
        "EP_SIZE": str(ep),
        "DP_ATTENTION": str(dp_attention).lower(),
    }
    return {
        "environment": environment,
        "draft": recipe.draft.repo if recipe.draft and method_of(recipe) != "none" else None,
        "accept_length": found.acceptance.length if found.acceptance else None,
        "differs": _differences(found),
    }


def _differences(found: Measurement) -> list[str]:
    """Return how a measurement departs from InferenceX's own protocol."""
    work = found.workload
    rules = {
        "lengths are not drawn from 0.8 to 1 times the target": work.range_ratio != 0.8,
        "prompts went without the chat template": not work.chat_template,
        "not 10 prompts for each request in flight": found.num_prompts != 10 * found.concurrency,
        "a shape that InferenceX does not run any more": (work.input_len, work.output_len) != (8192, 1024),
    }
    return [text for text, departs in rules.items() if departs]


def _parallel(recipe: Recipe) -> tuple[int, int, bool]:
    """Return tensor- and expert-parallel size, and whether attention is data-parallel."""
    args = resolve(recipe).args
    tp = int(str(args.get("tp-size", args.get("tensor-parallel-size", 1))))
    ep = int(str(args.get("ep-size", tp if args.get("enable-expert-parallel") else 1)))
    return tp, ep, bool(args.get("enable-dp-attention"))


def _names(recipe: Recipe) -> tuple[str, str]:
    """Return InferenceX's prefix and precision, or the repository's name and `unknown`."""
    return _MODELS.get(recipe.model.repo, (recipe.model.repo.rpartition("/")[2].lower(), "unknown"))

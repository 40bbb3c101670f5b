"""Measure what an argument or gate of a recipe gains in a prefill alone: starts with it and without, A B B A."""

from __future__ import annotations

from pathlib import Path

from kimi_w4a8_eagle3.gates import read_gates
from kimi_w4a8_eagle3.recipe.schema import Recipe

from ..base.server_under_test import Target
from ..base.verdict import Verdict
from ..speed.bench import Plan, Say, Texts, bench
from ..speed.runs import grouped, read_run
from ..speed.statistics import METRICS, ratio
from ..speed.workloads import Workload
from .journal import Figure, StageResult

LEVERS = ("enable-attn-tp-input-scattered", "env.KIMI_DENSE_FP8")  # what shortens a prefill, as for `serve --set`
_ENV = "env."
REPEATS, ROUNDS = 4, 2
_TTFT = METRICS["ttft_median_ms"]


def levers_of(recipe: Recipe) -> list[str]:
    """Return the levers that a recipe turns on."""
    gates = read_gates(recipe.environment)
    on = {**recipe.final_args, **{f"{_ENV}{name}": value for name, value in gates.given.items()}}
    return [name for name in LEVERS if on.get(name) not in (None, False, "off")]


def without(recipe: Recipe, lever: str, folder: Path) -> Path:
    """Write the recipe with the lever off."""
    path = folder / f"{recipe.name}-without-{lever}.toml"
    summary = f"{recipe.name} without {lever}, for a comparison."
    table, value = ("env", '"off"') if lever.startswith(_ENV) else ("args", "false")
    off = f"[{table}]\n{lever.removeprefix(_ENV)} = {value}\n"
    path.write_text(f'extends = "{recipe.name}"\nsummary = "{summary}"\n\n{off}')
    return path


def measure_lever(
    recipe: Recipe, lever: str, workload: Workload, texts: Texts, folder: Path, say: Say, api_key: str | None
) -> StageResult:
    """Return tokens a second of prefills with and without the lever; nothing is judged, since no figure is known."""
    sides = [Target(recipe=name, api_key=api_key) for name in (str(without(recipe, lever, folder)), recipe.name)]
    run = read_run(bench(Plan(sides, [workload], REPEATS, ROUNDS), texts, folder, say))
    off, on = (grouped([run])[workload.name, workload.concurrency[0]][side.name] for side in sides)
    assert workload.input_len is not None
    rates = [1000 * workload.input_len / cell.figures[_TTFT.key].value for cell in (off, on)]
    gain = ratio(on.repetitions, off.repetitions, _TTFT)
    spread = "" if gain.low is None or gain.high is None else f" [{gain.low:.3f}, {gain.high:.3f}]"
    figures = [Figure(f"prefill {name}", rate, "tok/s") for name, rate in zip(("without", "with"), rates, strict=True)]
    figures.append(Figure("gain", gain.value, "x"))
    return StageResult(
        f"prefills are {gain.value:.3f}x{spread} as fast with {lever}", Verdict.MEASURED, figures=figures
    )

"""A lever is measured by pairs: the recipe with it and without it, on prefills alone."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from kimi_w4a8_eagle3.machine.hardware import Device, Machine
from kimi_w4a8_eagle3.recipe.launch import load_recipe, render
from kimi_w4a8_lab.accept import lever_stage, stages
from kimi_w4a8_lab.accept.lever_stage import levers_of, measure_lever, without
from kimi_w4a8_lab.base.verdict import Verdict
from kimi_w4a8_lab.speed.bench import Plan, Texts
from kimi_w4a8_lab.speed.statistics import Interval, Repetition
from kimi_w4a8_lab.speed.workloads import load_workload

LEVER, FP8 = "enable-attn-tp-input-scattered", "env.KIMI_DENSE_FP8"
EIGHT = Machine(tuple(Device("gfx942", 304, f"0000:0{i}:00.0", 0, 256 << 30) for i in range(8)))


def test_the_recipe_without_a_lever_differs_in_its_argument_alone(tmp_path: Path) -> None:
    recipe = load_recipe("agent")
    assert levers_of(recipe) == [LEVER] and levers_of(load_recipe("eagle3")) == []
    other = load_recipe(str(without(recipe, LEVER, tmp_path)))
    assert levers_of(other) == []
    on, off = (render(one, machine=EIGHT).args for one in (recipe, other))
    assert {name for name in on.keys() | off.keys() if on.get(name) != off.get(name)} == {LEVER}


def test_the_recipe_without_a_gate_differs_in_its_environment_alone(tmp_path: Path) -> None:
    recipe = load_recipe("agent-fast")
    assert levers_of(recipe) == [LEVER, FP8]
    other = load_recipe(str(without(recipe, FP8, tmp_path)))
    assert levers_of(other) == [LEVER] and other.final_args == recipe.final_args
    assert recipe.environment.items() - other.environment.items() == {("KIMI_DENSE_FP8", "prefill")}


def test_the_gain_is_that_of_pairs_of_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans, load = list[Plan](), load_workload("prefill")

    def bench(plan: Plan, *_: object) -> Path:
        plans.append(plan)
        return tmp_path

    def cell(ttft: float) -> SimpleNamespace:
        repetition = Repetition(SimpleNamespace(median_ttft_ms=ttft), None)  # type: ignore[arg-type]
        return SimpleNamespace(figures={"ttft_median_ms": Interval(ttft, None, None)}, repetitions=[repetition])

    cells = {f"agent-without-{LEVER}": cell(400.0), "agent": cell(320.0)}
    monkeypatch.setattr(lever_stage, "bench", bench)
    monkeypatch.setattr(lever_stage, "read_run", lambda folder: folder)
    monkeypatch.setattr(lever_stage, "grouped", lambda _: {("prefill", 1): cells})
    found = measure_lever(load_recipe("agent"), LEVER, load, Texts(), tmp_path, lambda _: None, None)
    assert found.verdict is Verdict.MEASURED and f"1.250x as fast with {LEVER}" in found.found
    assert [figure.value for figure in found.figures] == [25600.0, 32000.0, 1.25]
    starts = [side.name for side, _ in plans[0].blocks()]
    assert starts == [f"agent-without-{LEVER}", "agent", f"agent-without-{LEVER}"]  # A, B twice in one start, A


def test_a_full_acceptance_on_gpus_measures_each_lever_of_its_first_recipe() -> None:
    run = stages.AcceptRun(Path(), ["agent", "eagle3"], stages.Sizes(full=True), None, Texts(), machine=EIGHT)  # type: ignore[arg-type]
    names = [stage.name for stage in run.stages() if "with and without" in stage.name]
    assert names == [f"agent: prefill with and without {LEVER}"]

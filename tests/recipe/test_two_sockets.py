"""SGLang itself puts every rank of every recipe beside its GPU, on a machine with two sockets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.sglang_program import RELEASES, VERSIONS
from support.two_sockets import Rank, machine, misplaced, ranks

from kimi_w4a8_eagle3.machine.hardware import Device, Machine
from kimi_w4a8_eagle3.recipe.launch import Launch, load_recipe, missing_gpus, recipe_names, render, with_settings

SERVED = [n for n in recipe_names() if load_recipe(n).hardware.gpus]
# Layouts that no recipe has, as a user may set them.
SETTINGS = {"half of the node": ["tp-size=4"], "two groups in one engine": ["tp-size=4", "dp-size=2"]}


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Launch]:
    here = machine(tmp_path_factory.mktemp("machine"))
    found = {name: render(load_recipe(name), machine=here) for name in SERVED}
    found |= {name: render(load_recipe("agent"), settings, machine=here) for name, settings in SETTINGS.items()}
    half = render(load_recipe("agent"), ["tp-size=4", "base-gpu-id=4"], machine=here)
    wrong = {
        "by rank": half.with_args(numa_node=[1, 1, 1, 1]),
        "swapped": half.with_args(numa_node=[1, 1, 1, 1, 0, 0, 0, 0]),
        "spread": replace(half, env={**half.env, "SGLANG_SET_CPU_AFFINITY": "1"}),
    }
    return found | wrong


@pytest.fixture(scope="module", params=RELEASES, ids=VERSIONS)
def placed(
    layouts: dict[str, Launch], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Rank] | str]:
    found = ranks(layouts.values(), request.param, tmp_path_factory.mktemp("ranks"))
    return dict(zip(layouts, found, strict=True))


@pytest.mark.parametrize("name", [*SERVED, *SETTINGS])
def test_every_rank_is_beside_its_gpu(
    layouts: dict[str, Launch], placed: dict[str, list[Rank] | str], name: str
) -> None:
    assert misplaced([placed[name]]) == []
    groups = 2 if name == "two groups in one engine" else 1
    assert len(placed[name]) == groups * layouts[name].tensor_parallel


def test_a_wrong_placement_is_found(placed: dict[str, list[Rank] | str]) -> None:
    (error,) = misplaced([placed["by rank"]])
    assert "IndexError" in error
    sockets = [f"GPU {gpu}: {what} on the wrong socket" for gpu in range(4, 8) for what in ("CPUs", "memory")]
    assert misplaced([placed["swapped"]]) == sockets
    assert misplaced([placed["spread"]]) == sockets[:4]  # SGLang does not bind to a node without any of its cores


EIGHT = Machine(tuple(Device("gfx942", 304, f"0000:{i:02x}:00.0", i // 4, 256 << 30) for i in range(8)))


@pytest.mark.parametrize(("settings", "value"), [((), None), (["tp-size=4"], "0"), (["tp-size=16", "nnodes=2"], None)])
def test_only_an_engine_with_all_gpus_keeps_the_core_lists_of_the_base_image(
    settings: Sequence[str], value: str | None
) -> None:
    launch = render(load_recipe("agent"), settings, machine=EIGHT)
    assert launch.env.get("SGLANG_SET_CPU_AFFINITY") == value
    assert any("SGLANG_SET_CPU_AFFINITY=0" in note.found for note in launch.notes) == (value is not None)
    asked = render(load_recipe("agent"), [*settings, "env.SGLANG_SET_CPU_AFFINITY=1"], machine=EIGHT)
    assert asked.env["SGLANG_SET_CPU_AFFINITY"] == "1"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"args.tp-size": 16}, "an engine needs 16 GPUs, this machine has 8"),
        ({"args.tp-size": 16, "args.nnodes": 2}, None),
    ],
)
def test_missing_gpus_are_named_also_without_the_machine(settings: dict[str, int], problem: str | None) -> None:
    recipe = with_settings(load_recipe("agent"), settings)
    assert missing_gpus(recipe, EIGHT) == problem
    assert missing_gpus(recipe, Machine(())) == (problem and problem.replace("this", "the recipe's"))

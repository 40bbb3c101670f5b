"""Core lists of the base image, and GPUs that an engine lacks, also where the machine is not known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kimi_w4a8_eagle3.machine.hardware import Device, Machine
from kimi_w4a8_eagle3.recipe.launch import load_recipe, missing_gpus, render, with_settings

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

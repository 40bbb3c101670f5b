"""SGLang itself puts every rank of every engine of every recipe beside its GPU, on a machine with two sockets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.sglang_program import RELEASES, VERSIONS
from support.two_sockets import Rank, machine, misplaced, ranks

from kimi_w4a8_eagle3.fleet.serve import replica_launches
from kimi_w4a8_eagle3.recipe.launch import Launch, load_recipe, recipe_names, render

SERVED = [n for n in recipe_names() if load_recipe(n).hardware.gpus]
# Layouts that no recipe has, as a user may set them.
SETTINGS = {"half of the node": ["tp-size=4"], "two groups in one engine": ["tp-size=4", "dp-size=2"]}


def engines(recipe: str, root: Path, *settings: str) -> list[Launch]:
    return replica_launches(render(load_recipe(recipe), settings, machine=machine(root)))


def planted(root: Path) -> dict[str, list[Launch]]:
    """Placements that were wrong once."""
    first, second = engines("agent-2x4", root)
    by_rank = second.with_args(numa_node=[1, 1, 1, 1])
    swapped = [engine.with_args(numa_node=[1, 1, 1, 1, 0, 0, 0, 0]) for engine in (first, second)]
    spread = [replace(engine, env={**engine.env, "SGLANG_SET_CPU_AFFINITY": "1"}) for engine in (first, second)]
    return {"by rank": [first, by_rank], "swapped": swapped, "spread": spread, "twice": [first, first]}


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Launch]]:
    root = tmp_path_factory.mktemp("machine")
    found = {name: engines(name, root) for name in SERVED}
    return found | {name: engines("agent", root, *settings) for name, settings in SETTINGS.items()} | planted(root)


@pytest.fixture(scope="module", params=RELEASES, ids=VERSIONS)
def placed(
    layouts: dict[str, list[Launch]], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[list[Rank] | str]]:
    flat = [launch for launches in layouts.values() for launch in launches]
    found = iter(ranks(flat, request.param, tmp_path_factory.mktemp("ranks")))
    return {name: [next(found) for _ in launches] for name, launches in layouts.items()}


@pytest.mark.parametrize("name", [*SERVED, *SETTINGS])
def test_every_rank_is_beside_its_gpu(
    layouts: dict[str, list[Launch]], placed: dict[str, list[list[Rank] | str]], name: str
) -> None:
    assert misplaced(placed[name]) == []
    groups = 2 if name == "two groups in one engine" else 1
    assert [len(engine) for engine in placed[name]] == [groups * launch.tensor_parallel for launch in layouts[name]]


def test_a_wrong_placement_is_found(placed: dict[str, list[list[Rank] | str]]) -> None:
    (error,) = misplaced(placed["by rank"])
    assert "IndexError" in error
    sockets = [f"GPU {gpu}: {what} on the wrong socket" for gpu in range(8) for what in ("CPUs", "memory")]
    assert misplaced(placed["swapped"]) == sockets
    spread = [f"GPU {gpu}: CPUs on the wrong socket" for gpu in (2, 3, 4, 5)]
    assert misplaced(placed["spread"]) == [*spread, "engines 0 and 1 share CPUs"]
    assert "engines 0 and 1 share CPUs" in misplaced(placed["twice"])

"""Each replica of one machine gets its own GPUs, port and host, and impossible placements are refused."""

from dataclasses import replace

import pytest

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.fleet.serve import replica_launches
from kimi_w4a8_eagle3.machine.hardware import Device, Machine
from kimi_w4a8_eagle3.recipe.launch import (
    Launch,
    Recipe,
    load_recipe,
    missing_gpus,
    render,
    unmet_requirements,
    with_settings,
)

GIB = 1 << 30
GPUS = tuple(Device("gfx942", 304, f"0000:{i:02x}:00.0", i // 8, 256 * GIB) for i in range(16))


def place(recipe: str | Recipe, count: int, machine: Machine, host: str = "127.0.0.1") -> list[Launch]:
    chosen = load_recipe(recipe) if isinstance(recipe, str) else recipe
    return replica_launches(render(chosen, [f"host={host}", f"options.replicas={count}"], machine=machine))


def option(launch: Launch, name: str) -> str:
    return launch.argv[launch.argv.index(name) + 1]


def test_each_replica_has_its_own_gpus_and_its_own_port_on_loopback():
    first, second = place("eagle3-opt", 2, Machine(GPUS))
    assert (option(first, "--base-gpu-id"), option(second, "--base-gpu-id")) == ("0", "8")
    assert first.port != second.port
    assert first.host == second.host == "127.0.0.1"


def test_a_replica_gets_the_numa_nodes_of_all_gpus():
    """SGLang looks the GPU up in it by its number on the machine (test_two_sockets.py)."""
    for replica in place("eagle3-opt", 2, Machine(GPUS)):
        assert replica.args["numa-node"] == [0] * 8 + [1] * 8


def test_only_the_router_reaches_a_replica():
    """SGLang's own /generate is open through a router on loopback without a key, and closed otherwise."""
    local = place("tiny", 3, Machine())
    assert [launch.env["KIMI_DOOR"] for launch in local] == ["closed"] * 3
    assert [launch.env["KIMI_DOOR_NATIVE"] for launch in local] == ["keyless"] * 3
    opened = with_settings(load_recipe("tiny"), {"env.KIMI_DOOR_NATIVE": "open"})
    assert [launch.env["KIMI_DOOR_NATIVE"] for launch in place(opened, 2, Machine())] == ["open"] * 2
    beyond = place("tiny", 3, Machine(), host="0.0.0.0")
    assert [launch.env.get("KIMI_DOOR_NATIVE") for launch in beyond] == [None] * 3


def test_replicas_on_a_cpu_have_no_gpus_and_may_be_more() -> None:
    replicas = place("tiny", 9, Machine(GPUS[:8]))
    assert len(replicas) == 9 and not any("base-gpu-id" in replica.args for replica in replicas)


@pytest.mark.parametrize(("count", "gpus"), [(2, 8), (3, 16), (2, 15)])
def test_more_replicas_than_gpus_are_refused(count, gpus):
    with pytest.raises(KimiError, match=f"{count} engines of 8 GPUs need {8 * count}, this machine has {gpus}"):
        place("eagle3-opt", count, Machine(GPUS[:gpus]))


def test_two_engines_of_four_gpus_each_stay_on_one_numa_node():
    machine = Machine(tuple(replace(gpu, numa_node=i // 4) for i, gpu in enumerate(GPUS[:8])))
    first, second = replica_launches(render(load_recipe("agent-2x4"), machine=machine))
    assert [option(launch, "--base-gpu-id") for launch in (first, second)] == ["0", "4"]
    assert [option(launch, "--tp-size") for launch in (first, second)] == ["4", "4"]
    assert first.args["numa-node"] == second.args["numa-node"] == [0] * 4 + [1] * 4
    assert first.env["SGLANG_SET_CPU_AFFINITY"] == second.env["SGLANG_SET_CPU_AFFINITY"] == "0"
    assert unmet_requirements(load_recipe("agent-2x4"), machine) == []
    unread = replica_launches(
        render(load_recipe("agent-2x4"), machine=Machine(tuple(replace(g, numa_node=None) for g in GPUS[:8])))
    )
    assert all("--numa-node" not in launch.argv for launch in unread)  # the published list is for eight GPUs


@pytest.mark.parametrize(("settings", "value"), [((), None), (["tp-size=4"], "0"), (["tp-size=16", "nnodes=2"], None)])
def test_only_an_engine_with_all_gpus_keeps_the_core_lists_of_the_base_image(settings, value):
    machine = Machine(tuple(replace(gpu, numa_node=i // 4) for i, gpu in enumerate(GPUS[:8])))
    launch = render(load_recipe("agent"), settings, machine=machine)
    assert launch.env.get("SGLANG_SET_CPU_AFFINITY") == value
    assert any("SGLANG_SET_CPU_AFFINITY=0" in note.found for note in launch.notes) == (value is not None)
    asked = render(load_recipe("agent"), [*settings, "env.SGLANG_SET_CPU_AFFINITY=1"], machine=machine)
    assert asked.env["SGLANG_SET_CPU_AFFINITY"] == "1"


@pytest.mark.parametrize(
    ("nodes", "count", "problem"),
    [
        ([0, 0, 0, 1, 1, 1, 1, 1], 2, "engine 0 of 2 would use GPUs of the NUMA nodes 0, 1"),
        ([0] * 4 + [1] * 4, 3, "3 engines of 4 GPUs need 12, this machine has 8"),
    ],
)
def test_a_layout_that_does_not_fit_the_machine_is_named(nodes, count, problem):
    machine = Machine(tuple(replace(GPUS[i], numa_node=node) for i, node in enumerate(nodes)))
    recipe = with_settings(load_recipe("agent-2x4"), {"options.replicas": count})
    assert unmet_requirements(recipe, machine) == [problem]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"args.tp-size": 16}, "an engine needs 16 GPUs, this machine has 8"),
        ({"args.tp-size": 16, "args.nnodes": 2}, None),
        ({"args.tp-size": 4, "options.replicas": 3}, "3 engines of 4 GPUs need 12, this machine has 8"),
    ],
)
def test_missing_gpus_are_named_also_without_the_machine(settings, problem):
    recipe = with_settings(load_recipe("agent"), settings)
    assert missing_gpus(recipe, Machine(GPUS[:8])) == problem
    assert missing_gpus(recipe, Machine(())) == (problem and problem.replace("this", "the recipe's"))

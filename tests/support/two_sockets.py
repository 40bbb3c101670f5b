"""A machine with two sockets and eight MI325X that does not exist: sysfs, cores, and where SGLang puts the ranks.

Two EPYC of 64 cores with SMT, one NUMA node each: Linux numbers the cores of both sockets first, then their second
threads (Documentation/admin-guide/cputopology.rst), and AMD's MI325X platforms have four GPUs beside each socket
(rocm.docs.amd.com, "System topology"). `ranks` runs SGLang's own parser, its launch of schedulers and their
configuration, and replaces what asks this machine: processes, psutil's view of cores, and libnuma.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from support.machines import OF_THE_BASE, PCI, gpu_files, host_files, write
from support.sglang_program import found

from kimi_w4a8_eagle3.engine.process import Program
from kimi_w4a8_eagle3.machine.hardware import Machine
from kimi_w4a8_eagle3.recipe.arguments import command_words
from kimi_w4a8_eagle3.recipe.launch import Launch, load_recipe, render

CORES = 128
THREADS = 2 * CORES
PROGRAM = Path(__file__).with_name("ranks_program.py")
LAYOUT = ("tp-size", "pp-size", "dp-size", "enable-dp-attention", "nnodes", "node-rank", "base-gpu-id", "numa-node")
BINDING = ("SGLANG_SET_CPU_AFFINITY", "SGLANG_NUMA_BIND_V2", "SGLANG_AUTO_NUMA_BIND")
# The values that change a process's cores; the other variables of the base image do not.
BASE_IMAGE = {"SGLANG_SET_CPU_AFFINITY": "1"}
assert set(BASE_IMAGE) <= set(OF_THE_BASE)


def cpus_of(node: int) -> set[int]:
    """The CPUs of a socket: its cores and their second threads."""
    cores = range(node * CORES // 2, (node + 1) * CORES // 2)
    return {*cores, *(core + CORES for core in cores)}


def node_of(gpu: int) -> int:
    """The socket beside a GPU."""
    return gpu // 4


def machine(root: Path) -> Machine:
    """The machine as `serve` reads it."""
    write(root, host_files())
    for index, pci in enumerate(PCI):
        write(root, gpu_files(index, pci))
    return Machine.detect(root / "sys")


@dataclass(frozen=True)
class Rank:
    """One scheduler: its GPU, its CPUs in the end, and the node that its memory is bound to."""

    gpu: int
    cpus: frozenset[int]
    memory: int | None


def ranks(engines: Iterable[Launch], newest: bool, folder: Path) -> list[list[Rank] | str]:
    """Return the ranks that SGLang starts for each engine, or its error."""
    keys = [json.dumps(_placing(engine)) for engine in engines]
    different = list(dict.fromkeys(keys))
    tiny = render(load_recipe("tiny")).command
    assert isinstance(tiny, Program)
    path = folder / "engines.json"
    path.write_text(json.dumps({"engines": [json.loads(key) for key in different], "tiny": tiny.arguments}))
    answers = dict(zip(different, found(PROGRAM.read_text(), newest, str(path))["engines"], strict=True))
    return [_engine(answers[key]) for key in keys]


def _engine(answer: list[tuple[int, list[int], int | None]] | str) -> list[Rank] | str:
    if isinstance(answer, str):
        return answer
    return [Rank(gpu, frozenset(cpus), memory) for gpu, cpus, memory in answer]


def _placing(engine: Launch) -> dict[str, object]:
    """Return the settings that place an engine's ranks; recipes differ in much else, and a start takes a second."""
    args = {name: value for name, value in engine.args.items() if name in LAYOUT}
    env = {name: value for name, value in (BASE_IMAGE | engine.env).items() if name in BINDING}
    return {"words": [*command_words({"model-path": "none", **args})], "env": env}


def misplaced(engines: list[list[Rank] | str]) -> list[str]:
    """Return what is wrong with the placement of engines on one machine."""
    if errors := [engine for engine in engines if isinstance(engine, str)]:
        return errors
    started = [engine for engine in engines if not isinstance(engine, str)]
    wrong = []
    gpus = [rank.gpu for engine in started for rank in engine]
    if len(gpus) != len(set(gpus)) or not set(gpus) <= set(range(len(PCI))):
        wrong.append(f"GPUs {gpus}")
    for rank in (rank for engine in started for rank in engine):
        if not rank.cpus or not rank.cpus <= cpus_of(node_of(rank.gpu)):
            wrong.append(f"GPU {rank.gpu}: CPUs on the wrong socket")
        if rank.memory != node_of(rank.gpu):
            wrong.append(f"GPU {rank.gpu}: memory on the wrong socket")
    owned = [(number, rank.cpus) for number, engine in enumerate(started) for rank in engine]
    for (number, cpus), (other, others) in combinations(owned, 2):
        # Ranks of one engine may share a whole socket, but not a part of their cores.
        if cpus & others and (number != other or cpus != others):
            wrong.append(f"engines {number} and {other} share CPUs")
    return sorted(set(wrong))

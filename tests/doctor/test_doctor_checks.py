"""The verdicts on good and bad machines."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from support.machines import (
    EAGLE3,
    GIB,
    PACKAGES,
    PCI,
    TINY,
    TOTAL_MIB,
    bare,
    cached,
    check,
    fetch_pretended,
    gpu_files,
    mi325x,
    problems,
    remove,
    write,
)

from kimi_w4a8_eagle3.base.releases import SGLANG_NEWEST, SGLANG_PINNED
from kimi_w4a8_eagle3.doctor.probe import Process
from kimi_w4a8_eagle3.doctor.runner import examine
from kimi_w4a8_eagle3.machine.aiter_patches import PatchState, State
from kimi_w4a8_eagle3.machine.aiter_regime import Regime
from kimi_w4a8_eagle3.recipe.launch import Launch, load_recipe, resolve, with_settings


def changed(recipe: str, settings: dict[str, object]) -> Launch:
    return resolve(with_settings(load_recipe(recipe), settings))


def every_gpu(**changes: str) -> dict[str, str]:
    return {path: text for at, pci in enumerate(PCI) for path, text in gpu_files(at, pci, **changes).items()}


def mi355x() -> dict[str, str]:
    def other(text: str) -> str:
        return text.replace("simd_count 1216", "simd_count 1024").replace(str(TOTAL_MIB << 20), str(288 << 30))

    files = (gpu_files(at, pci, arch=90500) for at, pci in enumerate(PCI))
    return {path: other(text) for part in files for path, text in part.items()}


@dataclass(frozen=True)
class Case:
    """An MI325X machine with other answers and files (None: removed), a check, and its verdict; * is any text."""

    check: str
    verdict: str
    found: str = ""
    remedy: str = ""
    answers: dict[str, object] = field(default_factory=dict)
    files: dict[str, str | None] = field(default_factory=dict)
    asked: Launch = EAGLE3


SWAPPED = {f"sys/bus/pci/devices/{pci}/numa_node": str(1 - at // 4) for at, pci in enumerate(PCI)}
NODES = "sys/class/kfd/kfd/topology/nodes"
DRIVERLESS = dict.fromkeys(("sys/class/kfd", "sys/module/amdgpu", "dev/kfd", "dev/dri"))
INBOX = {"sys/module/amdgpu/version": None, "proc/sys/kernel/osrelease": "6.17.0"}
SMALL_LIMITS = {"limits": {"memlock": 64 << 20, "nofile": 1024}}
NO_KERNELS = {"packages": {"sglang": SGLANG_PINNED, "torch": "2.11"}, "kernels_refused": "one was altered"}
CLOSED = {"closed": frozenset({"dev/kfd", "dev/dri/renderD128"})}
CASES = {
    "six of eight GPUs": Case(
        "gpus", "fail", "6 x MI325X, 8 needed; 2 more are on the PCI bus but not offered to this process",
        files={f"{NODES}/8": None, f"{NODES}/9": None},
    ),
    "four GPUs are visible": Case(
        "gpus", "fail", remedy="unset HIP_VISIBLE_DEVICES", answers={"variables": {"HIP_VISIBLE_DEVICES": "0,1,2,3"}}
    ),
    "no driver: gpus": Case("gpus", "fail", "8 AMD GPUs on the PCI bus, but no amdgpu driver*", files=DRIVERLESS),
    "no driver: driver": Case("driver", "fail", remedy="modprobe amdgpu", files=DRIVERLESS),
    "no driver: devices": Case("devices", "fail", remedy="--device /dev/kfd", files=DRIVERLESS),
    "inbox driver": Case("driver", "ok", "amdgpu of kernel 6.17.0 (in-tree driver)", files=INBOX),
    "one other architecture": Case(
        "arch", "fail", "7 x gfx942, 1 x gfx90a; the recipe is for gfx942", files=gpu_files(3, PCI[3], arch=90010)
    ),
    "MI355X: arch": Case("arch", "fail", "8 x gfx950*", files=mi355x()),
    "partitions": Case(
        "partition", "fail", "8 x CPX/NPS4", "--compute-partition SPX",
        files=every_gpu(current_compute_partition="CPX", current_memory_partition="NPS4"),
    ),
    "memory in use": Case(
        "hbm", "fail", "in use: GPU 5 100.0 GiB", files=gpu_files(5, PCI[5], used_mib=100 * 1024)
    ),
    "small GPUs": Case(
        "hbm", "fail", "*; 288 GiB per GPU needed", asked=changed("eagle3-opt", {"hardware.hbm_gib": 288})
    ),
    "NUMA nodes are derived": Case("numa", "ok", "--numa-node 1 1 1 1 0 0 0 0", files=SWAPPED),
    "NUMA nodes of the recipe": Case(
        "numa", "warn", "*but the recipe has 0 0 0 0 1 1 1 1", files=SWAPPED,
        asked=resolve(load_recipe("eagle3-opt"), ["numa-node=[0, 0, 0, 0, 1, 1, 1, 1]"]),
    ),
    "NUMA nodes unknown": Case("numa", "warn", remedy="args.numa-node", files=every_gpu(numa_node="-1")),
    "no libnuma": Case("numa", "warn", "*libnuma is missing*", answers={"libraries": frozenset()}),
    "NUMA balancing": Case(
        "numa_balancing", "warn", remedy="sysctl kernel.numa_balancing=0", files={"proc/sys/kernel/numa_balancing": "1"}
    ),
    "docker's shared memory": Case("shm", "fail", remedy="--ipc=host", answers={"spaces": {"dev/shm": 64 << 20}}),
    "little shared memory": Case("shm", "warn", remedy="--ipc=host", answers={"spaces": {"dev/shm": 2 * GIB}}),
    "tiny in docker": Case("shm", "ok", answers={"spaces": {"dev/shm": 64 << 20}}, asked=TINY),
    "devices closed": Case(
        "devices", "fail", answers=CLOSED,
        remedy="-aG render,video $USER and log in again; in docker --group-add render --group-add video",
    ),
    "seven render nodes": Case(
        "devices", "fail", "7 render nodes in /dev/dri, 8 needed", files={"dev/dri/renderD135": None}
    ),
    "limit of pinned memory": Case("memlock", "warn", remedy="memlock=-1", answers=SMALL_LIMITS),
    "limit of open files": Case("nofile", "warn", "1024, 65536 needed", answers=SMALL_LIMITS),
    "torch for ROCm": Case("torch", "ok", answers={"build": "hip 7.2.1"}),
    "torch for CUDA": Case("torch", "fail", answers={"build": "cuda 12.8"}),
    "no torch": Case("torch", "fail", answers={"build": None}),
    "AITER that aborts": Case("aiter", "ok", "0.1.14; page offsets: abort", answers={"regime": Regime.ABORT}),
    "kernels": Case("kernels", "ok", "228 code objects in /opt/kimi/kernels"),
    "no AITER": Case("aiter", "fail", answers=NO_KERNELS),
    "altered kernels": Case("kernels", "fail", "one was altered", "kimi-w4a8 warm", answers=NO_KERNELS),
    "no plugin": Case("plugin", "fail", answers={"entry_points": ()}),
    "checkpoint at the Hub": Case(
        "model", "warn", "amd/Kimi-K2.5-W4A8 at main: 534.0 GB of 534.0 GB missing; the Hub has it",
        "kimi-w4a8 fetch --recipe eagle3-opt",
    ),
    "offline": Case("draft", "fail", "*HF_HUB_OFFLINE*", answers={"is_offline": True}),
    "small disk": Case(
        "disk", "fail", "*540.0 GB needed, 300.0 GB free in*", answers={"spaces": {"cache": 300 * 10**9}}
    ),
    "host memory below the weights": Case(
        "memory", "warn", "107.4 GB free, 534.0 GB of weights*", "weight-loader-disable-mmap=true",
        files={"proc/meminfo": f"MemAvailable: {100 << 20} kB"},
    ),
    "a container's limit below the weights": Case(
        "memory", "warn", "107.4 GB free*", files={"sys/fs/cgroup/memory.max": str(100 * GIB)}
    ),
    "little host memory without mmap": Case(
        "memory", "ok", files={"proc/meminfo": f"MemAvailable: {100 << 20} kB"},
        asked=resolve(load_recipe("eagle3-opt"), ["weight-loader-disable-mmap=true"]),
    ),
    "port in use": Case(
        "port", "fail", "port 9527 is used by process 7", answers={"taken": "port 9527 is used by process 7"}
    ),
}  # fmt: skip
PATCHES = {
    State.APPLIED: ("ok", ""),
    State.NOT_INSTALLED: ("skip", ""),
    State.NOT_APPLIED: ("warn", "kimi-w4a8 patch"),
    State.STALE_BUILD: ("fail", "kimi-w4a8 patch"),
    State.DOES_NOT_FIT: ("warn", "the AITER of the image"),
}
CASES |= {
    f"patch {state.value}": Case(
        "patch p", verdict, "*detail", remedy, {"patch_states": (PatchState("p", state, "detail"),)}
    )
    for state, (verdict, remedy) in PATCHES.items()
}
ENGINES = {
    "/usr/bin/python3 -m sglang.launch_server --model-path x": True,
    "sglang::scheduler_TP3": True,
    "VLLM::Worker_TP0": True,
    "python -m vllm.entrypoints.openai.api_server": True,
    "vim sglang/srt/server_args.py": False,
    "grep -r sglang.launch_server .": False,
    "bash": False,
}
CASES |= {
    command: Case(
        "processes",
        *(("warn", "", "kill 4711") if runs else ("ok",)),
        answers={"running": (Process(2, "kthreadd", "root"), Process(4711, command, "me"))},
    )
    for command, runs in ENGINES.items()
}
CASES["a container of its own"] = Case(
    "processes", "skip", "*on the host: pgrep*", answers={"running": (Process(1, "bash", "me"),)}
)
CASES["engines of other people"] = Case(
    "processes", "ok", "1 engine processes: 7 of bob (sglang::scheduler_TP3)",
    answers={"running": (Process(7, "sglang::scheduler_TP3", "bob"),)},
)  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_machine_gets_its_verdict(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    machine = mi325x(tmp_path, **case.answers)
    write(tmp_path, {path: text for path, text in case.files.items() if text is not None})
    for path in (path for path, text in case.files.items() if text is None):
        remove(tmp_path, path)
    result = check(machine, case.check, case.asked)
    assert result.severity.value == case.verdict
    assert fnmatchcase(result.found, case.found or "*") and case.remedy in result.remedy


def test_a_good_machine_passes_without_a_word(tmp_path):
    machine = mi325x(tmp_path)
    fetch_pretended(machine)
    report = examine(machine, EAGLE3)
    assert problems(report) == {} and not report.failed
    assert report.numa_nodes == [0, 0, 0, 0, 1, 1, 1, 1]
    found = {result.name: result.found for result in report.results}
    assert found["gpus"] == "8 x MI325X" and found["arch"] == "8 x gfx942"
    assert found["numa"] == "--numa-node 0 0 0 0 1 1 1 1"
    assert found["hbm"] == "255.7 of 256.0 GiB free on the fullest GPU"
    assert found["rocm"] == "7.2.0-43" and found["driver"] == "amdgpu 6.16.6"
    assert [result.name for result in report.results if result.remedy] == []


def test_a_bare_machine_gets_the_missing_parts_and_their_remedies(tmp_path):
    report = examine(bare(tmp_path, hub_answers=False), EAGLE3)
    assert report.failed
    gpus = next(result for result in report.results if result.name == "gpus")
    assert gpus.found == "no AMD GPU in this machine, 8 x gfx942 needed" and "--recipe tiny" in gpus.remedy
    failed = {name for name, verdict in problems(report).items() if verdict == "fail"}
    assert failed == {"gpus", "rocm", "torch", "aiter", "model", "draft"}


def test_a_bare_machine_is_ready_for_the_tiny_recipe(tmp_path):
    report = examine(bare(tmp_path, hub_answers=False), TINY)
    assert not report.failed and problems(report) == {}


def test_every_problem_has_a_remedy(tmp_path):
    missing = {"packages": {}, "build": None, "entry_points": (), "kernels_refused": "there are none"}
    machine = bare(tmp_path, hub_answers=False, taken="port 9527 is used", **missing)
    report = examine(machine, EAGLE3)
    assert len(problems(report)) >= 12
    assert all(result.remedy for result in report.results if result.severity.value in ("warn", "fail"))


@pytest.mark.parametrize(
    ("sglang", "rocm", "expected"),
    [
        (SGLANG_NEWEST, "7.0.0", {}),
        (SGLANG_PINNED, "nightly", {}),
        ("0.5.24", "7.2.0-43", {"fault sglang-untried": "warn"}),
        ("0.5.17", "7.2.0-43", {"fault sglang-0-5-16": "fail"}),
        (None, "6.4.3-1", {"sglang": "fail", "fault rocm-old": "warn"}),
    ],
)
def test_the_known_faults_of_releases_are_reported(tmp_path, sglang, rocm, expected):
    packages = {name: version for name, version in PACKAGES.items() if name != "sglang"}
    machine = mi325x(tmp_path, packages=packages | ({"sglang": sglang} if sglang else {}))
    fetch_pretended(machine)
    write(tmp_path, {"opt/rocm/.info/version": rocm})
    assert problems(examine(machine, EAGLE3)) == expected


def test_an_accepted_fault_does_not_fail(tmp_path):
    accepting = changed("eagle3", {"options.accept_faults": ["sglang-0-5-16"]})
    machine = mi325x(tmp_path, packages=PACKAGES | {"sglang": "0.5.16"})
    fetch_pretended(machine)
    assert problems(examine(machine, accepting)) == {}


def test_checkpoints_and_no_hub(tmp_path):
    silent = mi325x(tmp_path, hub_answers=False)
    assert check(silent, "draft").severity.value == "fail"
    assert silent.asked == ["amd/Kimi-K2.5-W4A8"]  # a Hub that does not answer is asked once


def test_a_checkpoint_that_is_half_here(tmp_path):
    machine = mi325x(tmp_path)
    fetch_pretended(machine)
    cached(machine, "amd/Kimi-K2.5-W4A8", "main", {"w": 4, "x": 3000})
    assert "3.0 kB of 3.0 kB missing" in check(machine, "model").found
    assert "3.0 kB to fetch" in check(machine, "disk").found


def test_a_check_that_breaks_does_not_hide_the_others(tmp_path):
    machine = mi325x(tmp_path)
    fetch_pretended(machine)
    write(tmp_path, {f"sys/bus/pci/devices/{PCI[0]}/numa_node": "not a number"})
    report = examine(machine, EAGLE3)
    broken = [result for result in report.results if "the check itself failed: ValueError" in result.found]
    assert broken and report.failed and report.numa_nodes is None
    assert any(result.name == "port" and result.severity.value == "ok" for result in report.results)

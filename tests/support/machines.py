"""Recorded machines for the doctor: a file tree with /sys, /proc and /dev, and answers to what else it asks."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.finding import Finding
from kimi_w4a8_eagle3.base.releases import SGLANG_PINNED
from kimi_w4a8_eagle3.doctor.probe import Probe, Process
from kimi_w4a8_eagle3.doctor.result import Report
from kimi_w4a8_eagle3.doctor.runner import examine
from kimi_w4a8_eagle3.fetch.hub import HubUnreachable
from kimi_w4a8_eagle3.machine.aiter_patches import PatchState, State
from kimi_w4a8_eagle3.machine.aiter_regime import Regime
from kimi_w4a8_eagle3.machine.hardware import BASE_RECORD
from kimi_w4a8_eagle3.recipe.launch import Launch, load_recipe, resolve

GIB = 1 << 30
COMMIT = "b" * 40
PCI = [f"0000:{bus:02x}:00.0" for bus in (0x05, 0x15, 0x65, 0x75, 0x85, 0x95, 0xE5, 0xF5)]
TOTAL_MIB, USED_MIB = 262_128, 287
EAGLE3, TINY = resolve(load_recipe("eagle3-opt")), resolve(load_recipe("tiny"))
# Every ENV of SGLang's docker/rocm.Dockerfile for gfx942-rocm724.
OF_THE_BASE = [
    "AITER_COMMIT", "AITER_COMMIT_DEFAULT", "AITER_USE_SYSTEM_TRITON", "BUILD_AITER_ALL", "BUILD_LLVM",
    "BUILD_MOONCAKE", "BUILD_TRITON", "BUILD_VLLM", "CARGO_BUILD_JOBS", "DEBIAN_FRONTEND", "GPU_ARCH",
    "GPU_ARCH_LIST", "HIP_FORCE_DEV_KERNARG", "HSA_ENABLE_IPC_MODE_LEGACY", "HSA_NO_SCRATCH_RECLAIM",
    "LIBGL_ALWAYS_INDIRECT", "NCCL_MIN_NCHANNELS", "PATH", "PIP_CONSTRAINT", "PYTORCH_ROCM_ARCH",
    "ROCM_QUICK_REDUCE_QUANTIZATION", "SETUPTOOLS_SCM_PRETEND_VERSION", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
    "SGLANG_DISABLE_CUDNN_CHECK", "SGLANG_INT4_WEIGHT", "SGLANG_MOE_PADDING", "SGLANG_ROCM_DISABLE_LINEARQUANT",
    "SGLANG_ROCM_FUSED_DECODE_MLA", "SGLANG_SET_CPU_AFFINITY", "SGLANG_USE_AITER", "SGLANG_USE_ROCM700A",
    "TORCHINDUCTOR_MAX_AUTOTUNE", "TORCHINDUCTOR_MAX_AUTOTUNE_POINTWISE", "TRITON_COMMIT",
]  # fmt: skip


@dataclass(frozen=True)
class Recorded(Probe):
    """A probe that answers from records."""

    libraries: frozenset[str] = frozenset({"libnuma.so.1"})
    closed: frozenset[str] = frozenset()
    spaces: dict[str, int] = field(default_factory=dict)
    limits: dict[str, int | None] = field(default_factory=lambda: {"memlock": None, "nofile": 1_048_576})
    packages: dict[str, str] = field(default_factory=dict)
    build: str | None = "hip 7.2.1"
    entry_points: tuple[str, ...] = ("kimi_w4a8_eagle3",)
    patch_states: tuple[PatchState, ...] = (PatchState("aiter-fmha-rtz", State.APPLIED, "detail"),)
    regime: Regime = Regime.FIXED64
    kernels_refused: str = ""
    taken: str | None = None
    running: tuple[Process, ...] = (Process(2, "kthreadd", "root"),)
    hub_answers: bool = True
    is_offline: bool = False
    variables: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def has_library(self, name: str) -> bool:
        return name in self.libraries

    def usable(self, path: str) -> bool:
        return path not in self.closed

    def group_of(self, path: str) -> str:
        return "render" if "renderD" in path else "video"

    def space(self, path: Path) -> tuple[int, int]:
        free = next((free for part, free in self.spaces.items() if part in str(path)), 2000 * GIB)
        return 4000 * GIB, free

    def environment(self) -> dict[str, str]:
        return self.variables

    def limit(self, name: str) -> int | None:
        return self.limits[name]

    def package(self, *names: str) -> str | None:
        return next((self.packages[name] for name in names if name in self.packages), None)

    def torch_build(self) -> str | None:
        return self.build

    def plugins(self) -> list[str]:
        return list(self.entry_points)

    def code_objects(self) -> tuple[Path, int]:
        if self.kernels_refused:
            raise KimiError(self.kernels_refused, remedy="kimi-w4a8 warm --objects /opt/kimi/kernels")
        return Path("/opt/kimi/kernels"), 228

    def patches(self) -> list[PatchState]:
        return list(self.patch_states)

    def aiter_regime(self) -> Regime:
        return self.regime

    def port_problem(self, host: str, port: int) -> str | None:
        return self.taken

    def processes(self) -> list[Process]:
        return list(self.running)

    def user(self) -> str:
        return "me"

    def cache(self) -> Path:
        return self.root / "cache"

    def offline(self) -> bool:
        return self.is_offline

    def ask_hub(self, repo: str, revision: str) -> None:
        self.asked.append(repo)
        if not self.hub_answers:
            raise HubUnreachable("cannot reach the Hub: ConnectError", remedy="check network")


def write(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")


def gpu_files(index: int, pci: str, arch: int = 90402, used_mib: int = USED_MIB, **changes: str) -> dict[str, str]:
    """Files by which the kernel describes one GPU. KFD counts the two CPU nodes first."""
    _, bus, _ = pci.split(":")
    node, device = f"sys/class/kfd/kfd/topology/nodes/{index + 2}", f"sys/bus/pci/devices/{pci}"
    properties = (
        f"cpu_cores_count 0\nsimd_count 1216\ngfx_target_version {arch}\nlocation_id {int(bus, 16) << 8}\ndomain 0"
    )
    return {
        f"{node}/properties": properties,
        f"{node}/mem_banks/0/properties": f"heap_type 1\nsize_in_bytes {TOTAL_MIB << 20}",
        f"{device}/vendor": "0x1002",
        f"{device}/class": "0x120000",
        f"{device}/numa_node": str(index // 4),
        f"{device}/mem_info_vram_total": str(TOTAL_MIB << 20),
        f"{device}/mem_info_vram_used": str(used_mib << 20),
        f"{device}/current_compute_partition": "SPX",
        f"{device}/current_memory_partition": "NPS1",
        f"dev/dri/renderD{128 + index}": "",
    } | {f"{device}/{name}": value for name, value in changes.items()}


def host_files() -> dict[str, str]:
    return {
        "sys/class/kfd/kfd/topology/nodes/0/properties": "cpu_cores_count 64\nsimd_count 0",
        "sys/class/kfd/kfd/topology/nodes/1/properties": "cpu_cores_count 64\nsimd_count 0",
        "sys/module/amdgpu/version": "6.16.6",
        "proc/sys/kernel/numa_balancing": "0",
        "proc/meminfo": f"MemTotal: {3 << 30} kB\nMemAvailable: {2 << 30} kB",
        "opt/rocm/.info/version": "7.2.0-43",
        "dev/kfd": "",
        "dev/shm/.keep": "",
    }


PACKAGES = {"sglang": SGLANG_PINNED, "torch": "2.11.0+git1234", "amd-aiter": "0.1.14"}


def base_record(**changes: object) -> str:
    """base.json as the build of a pinned base writes it."""
    record = {
        "reference": "lmsysorg/sglang-rocm:v1",
        "digest": "sha256:" + "d" * 64,
        "versions": {"triton": "3.7.0"},
        "commits": {"aiter": "c16d44b93a52", "sglang": "ffe98a4279"},
        "env": dict.fromkeys(OF_THE_BASE, "1"),
        "numactl": None,
    }
    return json.dumps(record | changes)


def mi325x(root: Path, **changes: object) -> Recorded:
    """A machine on which everything is as it should be, except what `changes` says."""
    write(root, host_files())
    for index, pci in enumerate(PCI):
        write(root, gpu_files(index, pci))
    write(root, {BASE_RECORD: base_record()})
    return Recorded(root=root, **({"packages": PACKAGES} | changes))  # type: ignore[arg-type]


def bare(root: Path, **changes: object) -> Recorded:
    """A laptop: no GPU, CPU builds."""
    write(root, {"dev/shm/.keep": "", "proc/sys/kernel/numa_balancing": "0"})
    packages = {"sglang": SGLANG_PINNED, "torch": "2.13.0+cpu"}
    defaults = {"packages": packages, "build": "cpu", "limits": {"memlock": 8 << 20, "nofile": 20_000}}
    return Recorded(root=root, **(defaults | changes))  # type: ignore[arg-type]


def remove(root: Path, path: str) -> None:
    target = root / path
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink()


def check(machine: Recorded, name: str, asked: Launch = EAGLE3) -> Finding:
    return next(result for result in examine(machine, asked).results if result.name == name)


def problems(report: Report) -> dict[str, str]:
    return {r.name: r.severity.value for r in report.results if r.severity.value in ("warn", "fail")}


def fetch_pretended(machine: Recorded, asked: Launch = EAGLE3) -> None:
    """Every checkpoint of the recipe is in the cache, with one file, and was verified."""
    for checkpoint in asked.recipe.checkpoints:
        folder = cached(machine, checkpoint.repo, checkpoint.revision, {"w": 4})
        write(folder.parents[1], {f"kimi-verified/{folder.name}": ""})


def cached(machine: Recorded, repo: str, revision: str, sizes: dict[str, int]) -> Path:
    """Leave what huggingface_hub would: the list of the files, and "w" of four bytes. Return the snapshot."""
    root = machine.cache() / f"models--{repo.replace('/', '--')}"
    listing = {
        "format_version": 1,
        "files": {path: {"size": size, "blob_id": "f" * 40} for path, size in sizes.items()},
    }
    write(root, {f"snapshots/{COMMIT}/w": "abc", f"trees/{COMMIT}.json": json.dumps(listing)})
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / revision).write_text(COMMIT)
    return root / "snapshots" / COMMIT

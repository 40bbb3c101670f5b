"""GPU models, the GPUs of this machine with their load, and the base of its container image.

`Machine.detect()` reads sysfs without a driver call or ROCm's tools; tests pass a directory tree of their own as
`sysfs`. `launch/docker/record_base.py` writes base.json before anything is added to the base image, and
`launch/base-image.toml` classifies every environment variable of the base.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..base.errors import KimiError, UsageError
from ..base.files import read_toml
from ..base.installed import installed_versions, operator_dir
from ..base.nearest import nearest

GIB = 1 << 30
SIMDS_PER_CU = 4
BASE_RECORD = "opt/kimi/base.json"
REBUILD = "run this package's image: docker build -t kimi-w4a8-eagle3 ."


@dataclass(frozen=True)
class Gpu:
    """One accelerator model; the bandwidth is the data-sheet peak in TB/s."""

    name: str
    arch: str
    compute_units: int
    hbm_bytes: int
    hbm_tb_s: float

    @property
    def hbm_gib(self) -> float:
        """Memory in GiB. Vendors call 2^30 bytes a GB here: an MI325X has 256 of them."""
        return self.hbm_bytes / GIB


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("mi308x", "gfx942", 80, 192 * GIB, 5.3),
        Gpu("mi300x", "gfx942", 304, 192 * GIB, 5.3),
        Gpu("mi325x", "gfx942", 304, 256 * GIB, 6.0),
        Gpu("mi350x", "gfx950", 256, 288 * GIB, 8.0),
        Gpu("mi355x", "gfx950", 256, 288 * GIB, 8.0),
    )
}


def gpu_by_name(name: str) -> Gpu:
    """Return the entry of `GPUS` called `name`, ignoring case."""
    key = name.lower().replace("-", "").replace(" ", "").removeprefix("instinct")
    if key not in GPUS:
        raise UsageError(
            f"unknown GPU {name!r}{nearest(key, GPUS)}", where="--gpu", expected="one of " + ", ".join(GPUS)
        )
    return GPUS[key]


@dataclass(frozen=True)
class Device:
    """One GPU of this machine, in the order in which HIP numbers them."""

    arch: str
    compute_units: int
    pci: str
    numa_node: int | None
    hbm_bytes: int


@dataclass(frozen=True)
class Machine:
    """The accelerators of a machine, none on a CPU-only one, and the versions of their software, where known.

    environment: variables that an engine inherits. base_problem: what is wrong with the record of the base image.
    """

    devices: tuple[Device, ...] = ()
    installed: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    base_problem: KimiError | None = None

    @classmethod
    def detect(cls, sysfs: Path = Path("/sys")) -> Machine:
        """Read the KFD topology (`class/kfd/kfd/topology/nodes`), whose node order is HIP's device order."""
        nodes = sysfs / "class/kfd/kfd/topology/nodes"
        found = sorted(nodes.glob("[0-9]*"), key=lambda node: int(node.name))
        devices = (_read_device(node, sysfs) for node in found)
        installed = installed_versions()
        there = tuple(device for device in devices if device is not None)
        problem = base_problem(installed) if there else None
        return cls(there, identified(installed), dict(os.environ), problem)

    @property
    def gpu(self) -> Gpu | None:
        """The common model of all devices; None if they differ or the model is unknown here."""
        kinds = {(device.arch, device.compute_units) for device in self.devices}
        if len(kinds) != 1:
            return None
        same = [gpu for gpu in GPUS.values() if (gpu.arch, gpu.compute_units) in kinds]
        hbm = self.devices[0].hbm_bytes
        best = min(same, key=lambda gpu: abs(gpu.hbm_bytes - hbm), default=None)
        return best if best is not None and abs(best.hbm_bytes - hbm) < 0.1 * best.hbm_bytes else None

    @property
    def numa_nodes(self) -> list[int] | None:
        """NUMA node of every GPU, in HIP's order; None where the machine does not report them, or has no GPU."""
        nodes = [device.numa_node for device in self.devices if device.numa_node is not None]
        return nodes if nodes and len(nodes) == len(self.devices) else None


def _read_device(node: Path, sysfs: Path) -> Device | None:
    properties = _read_properties(node / "properties")
    if not properties.get("simd_count"):
        return None  # a CPU node
    domain, location = properties.get("domain", 0), properties.get("location_id", 0)
    pci = f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"
    numa = int(_text(sysfs / "bus/pci/devices" / pci / "numa_node") or -1)
    banks = [_read_properties(bank / "properties") for bank in sorted((node / "mem_banks").glob("*"))]
    return Device(
        arch=_arch(properties.get("gfx_target_version", 0)),
        compute_units=properties["simd_count"] // SIMDS_PER_CU,
        pci=pci,
        numa_node=numa if numa >= 0 else None,  # -1: the firmware does not report it
        hbm_bytes=sum(bank.get("size_in_bytes", 0) for bank in banks),
    )


def _read_properties(path: Path) -> dict[str, int]:
    pairs = (line.split(maxsplit=1) for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].strip().isdigit()}


def _arch(version: int) -> str:
    """Convert 90402 to gfx942: major, minor, stepping have two decimal digits each; stepping is written in hex."""
    return f"gfx{version // 10000}{version // 100 % 100}{version % 100:x}"


class BaseImage(BaseModel):
    """Record of the base; versions and commits are by package name.

    digest: `sha256:...` if the build was pinned. numactl: its version in the base, None if the base lacks it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    reference: str
    digest: str | None = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    versions: dict[str, str]
    commits: dict[str, str]
    env: dict[str, str]
    numactl: str | None

    @property
    def unclassified(self) -> list[str]:
        """Variables of the base that launch/base-image.toml does not list."""
        return sorted(set(self.env) - {name for names in classified().values() for name in names})

    def foreign(self, installed: dict[str, str]) -> list[str]:
        """Return the packages whose installed version is not the recorded one: the record is of another image."""
        own = {name: {version, self._with_commit(name, version)} for name, version in self.versions.items()}
        return sorted(name for name, versions in own.items() if name in installed and installed[name] not in versions)

    def with_commits(self, installed: dict[str, str]) -> dict[str, str]:
        """Return the installed versions with the recorded commits, as in `0.5.20+g1234567`, where they name none."""
        return {name: self._with_commit(name, version) for name, version in installed.items()}

    def _with_commit(self, name: str, version: str) -> str:
        return f"{version}+g{self.commits[name]}" if name in self.commits and "+" not in version else version


@cache
def classified() -> dict[str, dict[str, str]]:
    """Return launch/base-image.toml: class (keep, set, unset) -> variable -> reason."""
    return read_toml(operator_dir("launch") / "base-image.toml")


def read_base(root: Path = Path("/")) -> BaseImage:
    """Read the record below `root`; raise KimiError if there is none or it is damaged."""
    path = root / BASE_RECORD
    try:
        return BaseImage.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise KimiError("no record of a base image: this is not this package's image", str(path), "", REBUILD) from None
    except (OSError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise KimiError(f"the record of the base image is unreadable: {reason}", str(path), "", REBUILD) from None


def identified(installed: dict[str, str], root: Path = Path("/")) -> dict[str, str]:
    """Return the installed versions with the commits of the base image, if its record is of this image."""
    return installed if base_problem(installed, root) else read_base(root).with_commits(installed)


def base_problem(installed: dict[str, str], root: Path = Path("/")) -> KimiError | None:
    """Return what is wrong with the record of the base image, None if it describes the `installed` packages."""
    try:
        base = read_base(root)
    except KimiError as error:
        return error
    foreign = base.foreign(installed)
    if not foreign:
        return None
    found = ", ".join(f"{name} {installed[name]}, recorded {base.versions[name]}" for name in foreign)
    return KimiError(f"the record is of another base image: {found}", str(root / BASE_RECORD), "", REBUILD)


AMD = "0x1002"


@dataclass(frozen=True)
class GpuLoad:
    """One GPU now; power in watts, temperature of the junction in degrees Celsius, None if the driver hides it."""

    pci: str
    memory_used: int
    memory_total: int
    power_w: float | None
    junction_c: float | None


def gpu_loads(sysfs: Path = Path("/sys")) -> list[GpuLoad]:
    """Return the load of every AMD GPU in the order of its PCI address; none on a machine without one."""
    cards = {path.resolve() for path in (sysfs / "class/drm").glob("card[0-9]*/device")}
    return [load for card in sorted(cards) if (load := gpu_load(card)) is not None]


def gpu_load(card: Path) -> GpuLoad | None:
    """Return the load of the GPU with this folder in sysfs; None if it is not AMD's, or its driver reports nothing."""
    used, total = (_number(card / f"mem_info_vram_{what}") for what in ("used", "total"))
    if _text(card / "vendor") != AMD or used is None or not total:
        return None
    power = junction = None
    for sensors in sorted(card.glob("hwmon/hwmon*")):
        watts = [_number(sensors / f"power1_{name}") for name in ("average", "input")]
        power = next((value / 1e6 for value in watts if value is not None), power)
        for label in sensors.glob("temp*_label"):
            if _text(label) == "junction":
                degrees = _number(label.with_name(label.name.replace("_label", "_input")))
                junction = junction if degrees is None else degrees / 1000
    return GpuLoad(card.name, used, total, power, junction)


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdigit() else None

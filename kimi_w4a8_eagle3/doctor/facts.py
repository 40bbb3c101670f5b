"""What the machine says about its GPUs, from the kernel and from amd-smi, asked once and shared by the checks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..base.errors import KimiError
from ..fetch.hub import HubUnreachable
from ..machine.hardware import Machine
from ..machine.installed import ROCM, installed_versions
from .needs import Needs
from .probe import Probe
from .smi import Smi, SmiGpu, parse_amd_smi

AMD = "0x1002"
ACCELERATOR_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")  # display controllers and processing accelerators


@dataclass(frozen=True)
class GpuMemory:
    """HBM of one GPU in bytes."""

    total: int
    used: int


@dataclass
class Facts:
    """A machine, a recipe's needs, and what was found out so far."""

    probe: Probe
    needs: Needs
    _unreachable: KimiError | None = None

    @cached_property
    def machine(self) -> Machine:
        """The GPUs that the driver offers to this process, in HIP's order."""
        return Machine.detect(self.probe.root / "sys")

    @cached_property
    def amd_smi(self) -> Smi | None:
        """What amd-smi says; None without it."""
        # Without section options: their set differs between releases, bare metal and virtual machines.
        static = self.probe.run(["amd-smi", "static", "--json"])
        if static.missing or static.timed_out:
            return None
        memory = self.probe.run(["amd-smi", "metric", "--mem-usage", "--json"])
        version = self.probe.run(["amd-smi", "version", "--json"])
        return parse_amd_smi(static.text, memory.text, version.text)

    @cached_property
    def rocm(self) -> str | None:
        """The version of the ROCm user space; None without one."""
        return self.probe.read(ROCM) or (self.amd_smi.rocm if self.amd_smi else None)

    @cached_property
    def installed(self) -> dict[str, str]:
        """Package -> version."""
        return installed_versions(self.probe.package, self.rocm or "")

    @property
    def smi_gpus(self) -> tuple[SmiGpu, ...]:
        """The GPUs that amd-smi sees; none without it."""
        return self.amd_smi.gpus if self.amd_smi else ()

    @cached_property
    def pci_count(self) -> int:
        """AMD GPUs on the PCI bus, whether or not a driver serves them."""
        vendors = [path for path in self.probe.glob("sys/bus/pci/devices/*/vendor") if path.read_text().strip() == AMD]
        classes = [path.with_name("class") for path in vendors]
        return sum(path.is_file() and path.read_text().startswith(ACCELERATOR_CLASSES) for path in classes)

    @cached_property
    def archs(self) -> list[str]:
        """Architecture of each GPU: from the kernel, else from amd-smi."""
        if self.machine.devices:
            return [device.arch for device in self.machine.devices]
        return [gpu.arch for gpu in self.smi_gpus if gpu.arch]

    @cached_property
    def count(self) -> int:
        """How many GPUs this process can use."""
        return len(self.machine.devices) or len(self.smi_gpus)

    @cached_property
    def memory(self) -> list[GpuMemory]:
        """HBM of each GPU: from the kernel, else from amd-smi; empty when nobody says."""
        found = [self._sysfs_memory(device.pci) for device in self.machine.devices]
        if found and all(found):
            return [memory for memory in found if memory]
        known = [GpuMemory(gpu.total, gpu.used) for gpu in self.smi_gpus if gpu.total and gpu.used is not None]
        return known if len(known) == len(self.smi_gpus) else []

    @cached_property
    def numa_nodes(self) -> list[int] | None:
        """The `--numa-node` list: one NUMA node for each GPU the recipe uses, in HIP's order."""
        count = self.needs.gpus or self.count
        if not count:
            return None
        if (nodes := self.machine.numa_nodes(count)) is not None:
            return nodes
        # amd-smi numbers GPUs by PCI address, HIP by the kernel's order: usable only by address.
        by_pci = {gpu.pci: gpu.numa for gpu in self.smi_gpus if gpu.pci and gpu.numa is not None}
        found = [by_pci.get(device.pci) for device in self.machine.devices[:count]]
        complete = len(found) == count and all(node is not None for node in found)
        return [node for node in found if node is not None] if complete else None

    def hub_problem(self, repo: str, revision: str) -> KimiError | None:
        """Why the Hub does not give a repository; None if it does. A Hub that does not answer is asked once."""
        if self._unreachable is None:
            try:
                self.probe.listing(repo, revision)
            except HubUnreachable as error:
                self._unreachable = error
            except KimiError as error:
                return error
        return self._unreachable

    def _sysfs_memory(self, pci: str) -> GpuMemory | None:
        total = self.probe.read(f"sys/bus/pci/devices/{pci}/mem_info_vram_total")
        used = self.probe.read(f"sys/bus/pci/devices/{pci}/mem_info_vram_used")
        return GpuMemory(int(total), int(used)) if total and used and total.isdigit() and used.isdigit() else None


def summary(values: list[str]) -> str:
    """`8 x gfx942`, or `4 x gfx942, 4 x gfx90a`."""
    return ", ".join(f"{values.count(value)} x {value}" for value in dict.fromkeys(values))

"""GPU facts of the machine, read from the kernel once and shared by the checks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..base.errors import KimiError
from ..base.installed import ROCM, installed_versions
from ..fetch.hub import HubUnreachable
from ..machine.hardware import AMD, GpuLoad, Machine, gpu_load, identified
from ..recipe.launch import Args, Launch, Recipe
from .probe import Probe

ACCELERATOR_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")  # display controllers and processing accelerators


@dataclass
class Facts:
    """A machine and what a recipe asks of it."""

    probe: Probe
    asked: Launch
    _unreachable: KimiError | None = None

    @property
    def recipe(self) -> Recipe:
        return self.asked.recipe

    @property
    def args(self) -> Args:
        """Engine arguments, not fitted to the machine."""
        return self.asked.args

    @property
    def gpus(self) -> int:
        """GPUs that the recipe needs; 0 on a CPU."""
        return self.recipe.hardware.gpus

    @cached_property
    def machine(self) -> Machine:
        """GPUs that the driver offers to this process, in HIP's order."""
        return Machine.detect(self.probe.root / "sys")

    @cached_property
    def rocm(self) -> str | None:
        """Version of the ROCm user space; None if there is none."""
        return self.probe.read(ROCM)

    @cached_property
    def installed(self) -> dict[str, str]:
        return identified(installed_versions(self.probe.package, self.rocm or ""), self.probe.root)

    @cached_property
    def pci_count(self) -> int:
        """AMD GPUs on the PCI bus, with or without a driver."""
        found = [path.parent for path in self.probe.root.glob("sys/bus/pci/devices/*/vendor")]
        amd = [device for device in found if self.probe.read(str(device / "vendor")) == AMD]
        return sum((self.probe.read(str(device / "class")) or "").startswith(ACCELERATOR_CLASSES) for device in amd)

    @property
    def count(self) -> int:
        return len(self.machine.devices)

    def loads(self) -> list[GpuLoad]:
        """Return the load of each GPU in HIP's order; empty if the driver does not report all of them."""
        found = [gpu_load(self.probe.root / "sys/bus/pci/devices" / device.pci) for device in self.machine.devices]
        return [load for load in found if load] if all(found) else []

    def hub_problem(self, repo: str, revision: str) -> KimiError | None:
        """Return why the Hub does not give a repository, or None. An unreachable Hub is asked only once."""
        if self._unreachable is None:
            try:
                self.probe.ask_hub(repo, revision)
            except HubUnreachable as error:
                self._unreachable = error
            except KimiError as error:
                return error
        return self._unreachable

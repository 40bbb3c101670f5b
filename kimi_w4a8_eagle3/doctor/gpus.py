"""Checks of the GPUs: number, architecture, memory and partitions."""

from __future__ import annotations

from ..base.finding import Finding
from ..machine.hardware import GIB
from ..recipe.on_machine import LEAST_HBM
from .facts import Facts
from .result import fail, ok, skip, warn

IN_USE = 2 * GIB  # an idle MI300-class GPU uses about 0.3 GiB
VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def _summary(values: list[str]) -> str:
    """Format values as `8 x gfx942`, or `4 x gfx942, 4 x gfx90a`."""
    return ", ".join(f"{values.count(value)} x {value}" for value in dict.fromkeys(values))


def gpus(facts: Facts) -> Finding:
    """Check that the driver offers enough GPUs to this process."""
    needed, count, on_bus = facts.gpus, facts.count, facts.pci_count
    if not needed:
        return skip(f"recipe {facts.recipe.name} runs on a CPU" + (f"; {count} AMD GPUs found" if count else ""))
    wanted = f"{needed} x {'/'.join(facts.recipe.hardware.arch) or 'AMD GPU'} needed"
    if not on_bus and not count:
        remedy = "use a machine with the GPUs, or try `--recipe tiny` on this one"
        return fail(f"no AMD GPU in this machine, {wanted}", remedy)
    if not count and not (facts.probe.root / "sys/module/amdgpu").exists():
        remedy = "install the amdgpu driver (amdgpu-dkms), then `sudo modprobe amdgpu`"
        return fail(f"{on_bus} AMD GPUs on the PCI bus, but no amdgpu driver, {wanted}", remedy)
    variables = facts.probe.environment()
    for name in VISIBLE:
        if count and name in variables and len(variables[name].split(",")) < needed:
            return fail(f"{name}={variables[name]} hides GPUs, {needed} needed", f"unset {name}")
    model = facts.machine.gpu
    found = f"{count} x {model.name.upper() if model else 'AMD GPU'}"
    if count < needed:
        hidden = f"; {on_bus - count} more are on the PCI bus but not offered to this process" if on_bus > count else ""
        remedy = "in a container, pass /dev/kfd and all of /dev/dri; on the host see `dmesg | grep amdgpu`"
        return fail(f"{found}, {needed} needed{hidden}", remedy)
    return ok(found)


def arch(facts: Facts) -> Finding:
    """Check that the GPUs have an architecture of the recipe's kernels."""
    needed, archs = facts.recipe.hardware.arch, [device.arch for device in facts.machine.devices]
    if needed and not set(archs[: facts.gpus]) <= set(needed):
        return fail(f"{_summary(archs)}; the recipe is for {', '.join(needed)}", "choose a recipe for this GPU")
    return ok(_summary(archs))


def partition(facts: Facts) -> Finding:
    """Check for whole GPUs; in a compute partition mode like CPX, one GPU appears as eight small ones."""
    paths = [f"sys/bus/pci/devices/{device.pci}/current_%s_partition" for device in facts.machine.devices]
    modes = [(facts.probe.read(path % "compute"), facts.probe.read(path % "memory") or "?") for path in paths]
    known = [f"{compute}/{memory}" for compute, memory in modes if compute]
    if not known:
        return skip("this driver does not report partitions")
    if any(not mode.startswith("SPX/") for mode in known):
        return fail(_summary(known), "sudo amd-smi set --compute-partition SPX --memory-partition NPS1")
    return ok(_summary(known))


def hbm(facts: Facts) -> Finding:
    """Check that every GPU has enough memory and that no other process uses it."""
    loads, needed = facts.loads()[: facts.gpus], facts.recipe.hardware.hbm_gib
    if not loads:
        return warn("the driver does not report free memory", "see `amd-smi metric --mem-usage`")
    smallest, free = min(gpu.memory_total for gpu in loads), min(gpu.memory_total - gpu.memory_used for gpu in loads)
    found = f"{free / GIB:.1f} of {smallest / GIB:.1f} GiB free on the fullest GPU"
    if smallest < LEAST_HBM * needed * GIB:
        return fail(f"{found}; {needed:.0f} GiB per GPU needed", "use larger GPUs, or another recipe")
    busy = [f"GPU {at} {gpu.memory_used / GIB:.1f} GiB" for at, gpu in enumerate(loads) if gpu.memory_used > IN_USE]
    if busy:
        return fail(f"in use: {', '.join(busy)}", "see `amd-smi process`, and ask the owners of the processes")
    return ok(found)

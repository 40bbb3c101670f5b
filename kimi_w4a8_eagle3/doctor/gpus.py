"""Checks of the GPUs: number, architecture, memory and partitions."""

from __future__ import annotations

from ..base.finding import Finding
from ..machine.hardware import GIB
from ..recipe.on_machine import LEAST_HBM
from .facts import Facts, summary
from .result import fail, ok, skip, warn

IN_USE = 2 * GIB  # an idle MI300-class GPU uses about 0.3 GiB
VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def gpus(facts: Facts) -> Finding:
    """Check that the driver offers enough GPUs to this process."""
    needed, count = facts.gpus, facts.count
    if not needed:
        return skip(f"recipe {facts.recipe.name} runs on a CPU" + (f"; {count} AMD GPUs found" if count else ""))
    if count == 0:
        return fail(*_none(facts))
    hiding = [f"{name}={value}" for name in VISIBLE if (value := facts.probe.environment().get(name)) is not None]
    short = [text for text in hiding if len(text.split("=")[1].split(",")) < needed]
    if short:
        return fail(f"{short[0]} hides GPUs, {needed} needed", f"unset {short[0].split('=')[0]}")
    model = facts.machine.gpu
    found = f"{count} x {model.name.upper() if model else 'AMD GPU'}"
    if count < needed:
        hidden = facts.pci_count - count
        more = f"; {hidden} more are on the PCI bus but not offered to this process" if hidden > 0 else ""
        return fail(
            f"{found}, {needed} needed{more}",
            "in a container, pass all of /dev/dri; check ROCR_VISIBLE_DEVICES, and dmesg for a lost GPU",
        )
    return ok(found)


def _none(facts: Facts) -> tuple[str, str]:
    """Return the reason why no GPU is usable, and the remedy."""
    needed = f"{facts.gpus} x {'/'.join(facts.recipe.hardware.arch) or 'AMD GPU'} needed"
    if facts.pci_count == 0:
        return (
            f"no AMD GPU in this machine, {needed}",
            "use a machine with the GPUs, or try `--recipe tiny` on this one",
        )
    if not (facts.probe.root / "sys/module/amdgpu").exists():
        return f"{facts.pci_count} AMD GPUs on the PCI bus, but no amdgpu driver, {needed}", (
            "install the amdgpu driver (amdgpu-dkms), then `sudo modprobe amdgpu`"
        )
    return f"{facts.pci_count} AMD GPUs on the PCI bus, but none usable here, {needed}", (
        "in a container, pass --device /dev/kfd --device /dev/dri; on the host see `dmesg | grep amdgpu`"
    )


def arch(facts: Facts) -> Finding:
    """Check that the GPUs have an architecture of the recipe's kernels."""
    needed, found = facts.recipe.hardware.arch, summary(facts.archs)
    wrong = [value for value in facts.archs[: facts.gpus] if needed and value not in needed]
    if wrong:
        return fail(f"{found}; the recipe is for {', '.join(needed)}", "choose a recipe for this GPU")
    return ok(found)


def partition(facts: Facts) -> Finding:
    """Check for whole GPUs; in a compute partition mode like CPX, one GPU appears as eight small ones."""
    devices = facts.machine.devices
    folder = "sys/bus/pci/devices/{}/current_{}_partition"
    compute = [facts.probe.read(folder.format(device.pci, "compute")) for device in devices]
    memory = [facts.probe.read(folder.format(device.pci, "memory")) for device in devices]
    known = [value for value in compute if value]
    if not known:
        return skip("this driver does not report partitions")
    found = summary([f"{mode}/{space or '?'}" for mode, space in zip(compute, memory, strict=True) if mode])
    if any(mode != "SPX" for mode in known):
        return fail(found, "sudo amd-smi set --compute-partition SPX --memory-partition NPS1")
    return ok(found)


def hbm(facts: Facts) -> Finding:
    """Check that every GPU has enough memory and that no other process uses it."""
    loads, needed = facts.loads[: facts.gpus], facts.recipe.hardware.hbm_gib
    if not loads:
        return warn("the driver does not report free memory", "see `amd-smi metric --mem-usage`")
    smallest, free = min(gpu.memory_total for gpu in loads), min(gpu.memory_total - gpu.memory_used for gpu in loads)
    found = f"{free / GIB:.1f} of {smallest / GIB:.1f} GiB free on the fullest GPU"
    if smallest < LEAST_HBM * needed * GIB:
        return fail(f"{found}; {needed:.0f} GiB per GPU needed", "use larger GPUs, or another recipe")
    busy = [f"GPU {at} {gpu.memory_used / GIB:.1f} GiB" for at, gpu in enumerate(loads) if gpu.memory_used > IN_USE]
    if busy:
        return fail(f"in use: {', '.join(busy)}", "find the processes with `amd-smi process` and stop them")
    return ok(found)

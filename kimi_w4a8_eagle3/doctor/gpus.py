"""Checks of the GPUs: number, architecture, memory and partitions."""

from __future__ import annotations

from ..base.finding import Finding
from .facts import Facts, summary
from .needs import GIB
from .result import fail, ok, skip, warn

IN_USE = 2 * GIB  # an idle MI300-class GPU uses about 0.3 GiB
VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
TOLERANCE = 0.02  # share of the nominal size that the driver reserves


def gpus(facts: Facts) -> Finding:
    """Check that the driver offers enough GPUs to this process."""
    needs, count = facts.needs, facts.count
    if not needs.on_gpu:
        return skip("gpus", f"recipe {needs.recipe} runs on a CPU" + (f"; {count} AMD GPUs found" if count else ""))
    if count == 0:
        return fail("gpus", *_none(facts))
    hiding = [f"{name}={value}" for name in VISIBLE if (value := facts.probe.environment().get(name)) is not None]
    short = [text for text in hiding if len(text.split("=")[1].split(",")) < needs.gpus]
    if short:
        return fail("gpus", f"{short[0]} hides GPUs, {needs.gpus} needed", f"unset {short[0].split('=')[0]}")
    model = facts.machine.gpu
    found = f"{count} x {model.name.upper() if model else 'AMD GPU'}"
    if count < needs.gpus:
        hidden = facts.pci_count - count
        more = f"; {hidden} more are on the PCI bus but not offered to this process" if hidden > 0 else ""
        return fail(
            "gpus",
            f"{found}, {needs.gpus} needed{more}",
            "in a container, pass all of /dev/dri; check ROCR_VISIBLE_DEVICES, and dmesg for a lost GPU",
        )
    return ok("gpus", found)


def _none(facts: Facts) -> tuple[str, str]:
    """Return the reason why no GPU is usable, and the remedy."""
    needed = f"{facts.needs.gpus} x {'/'.join(facts.needs.arch) or 'AMD GPU'} needed"
    if facts.pci_count == 0:
        return (
            f"no AMD GPU in this machine, {needed}",
            "use a machine with the GPUs, or try `--recipe tiny` on this one",
        )
    if not facts.probe.exists("sys/module/amdgpu"):
        return f"{facts.pci_count} AMD GPUs on the PCI bus, but no amdgpu driver, {needed}", (
            "install the amdgpu driver (amdgpu-dkms), then `sudo modprobe amdgpu`"
        )
    return f"{facts.pci_count} AMD GPUs on the PCI bus, but none usable here, {needed}", (
        "in a container, pass --device /dev/kfd --device /dev/dri; on the host see `dmesg | grep amdgpu`"
    )


def arch(facts: Facts) -> Finding:
    """Check that the GPUs have an architecture of the recipe's kernels."""
    needs = facts.needs
    found = summary(facts.archs)
    wrong = [value for value in facts.archs[: needs.gpus] if needs.arch and value not in needs.arch]
    if wrong:
        return fail("arch", f"{found}; the recipe is for {', '.join(needs.arch)}", "choose a recipe for this GPU")
    return ok("arch", found)


def partition(facts: Facts) -> Finding:
    """Check for whole GPUs; in a compute partition mode like CPX, one GPU appears as eight small ones."""
    devices = facts.machine.devices
    folder = "sys/bus/pci/devices/{}/current_{}_partition"
    compute = [facts.probe.read(folder.format(device.pci, "compute")) for device in devices]
    memory = [facts.probe.read(folder.format(device.pci, "memory")) for device in devices]
    known = [value for value in compute if value]
    if not known:
        return skip("partition", "this driver does not report partitions")
    found = summary([f"{mode}/{space or '?'}" for mode, space in zip(compute, memory, strict=True) if mode])
    if any(mode != "SPX" for mode in known):
        return fail("partition", found, "sudo amd-smi set --compute-partition SPX --memory-partition NPS1")
    return ok("partition", found)


def hbm(facts: Facts) -> Finding:
    """Check that every GPU has enough memory and that no other process uses it."""
    needs = facts.needs
    loads = facts.loads[: needs.gpus]
    if not loads:
        return warn("hbm", "the driver does not report free memory", "see `amd-smi metric --mem-usage`")
    smallest, free = min(gpu.memory_total for gpu in loads), min(gpu.memory_total - gpu.memory_used for gpu in loads)
    found = f"{free / GIB:.1f} of {smallest / GIB:.1f} GiB free on the fullest GPU"
    if smallest < needs.hbm * (1 - TOLERANCE):
        return fail("hbm", f"{found}; {needs.hbm / GIB:.0f} GiB per GPU needed", "use larger GPUs, or another recipe")
    busy = [f"GPU {at} {gpu.memory_used / GIB:.1f} GiB" for at, gpu in enumerate(loads) if gpu.memory_used > IN_USE]
    if busy:
        return fail("hbm", f"in use: {', '.join(busy)}", "find the processes with `amd-smi process` and stop them")
    return ok("hbm", found)

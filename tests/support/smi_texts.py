"""What amd-smi prints for eight GPUs, in the shapes of its releases, with numbers of our own."""

from __future__ import annotations

import json
from typing import Any

PCI = [f"0000:{bus:02x}:00.0" for bus in (0x05, 0x15, 0x65, 0x75, 0x85, 0x95, 0xE5, 0xF5)]
TOTAL_MIB, USED_MIB = 262_128, 287


def amd_static(numa: list[int] | None = None, arch: str = "gfx942", name: str = "AMD Instinct MI325X") -> list[dict]:
    """The per-GPU objects of `amd-smi static --json`."""
    return [
        {
            "gpu": index,
            "asic": {
                "market_name": name,
                "vendor_id": "0x1002",
                "device_id": "0x74a5",
                "oam_id": index,
                "num_compute_units": 304,
                "target_graphics_version": arch,
            },
            "bus": {"bdf": pci, "max_pcie_width": 16, "max_pcie_speed": {"value": 32, "unit": "GT/s"}},
            "driver": {"name": "amdgpu", "version": "6.16.6"},
            "board": {"model_number": "N/A", "product_name": name},
            "numa": {"node": index // 4 if numa is None else numa[index], "affinity": index // 4},
            "vram": {
                "type": "HBM3E",
                "vendor": "MICRON",
                "size": {"value": TOTAL_MIB, "unit": "MB"},
                "bit_width": 8192,
            },
        }
        for index, pci in enumerate(PCI)
    ]


def amd_memory(used_mib: int = USED_MIB) -> list[dict]:
    """The per-GPU objects of `amd-smi metric --mem-usage --json`."""

    def mib(value: int) -> dict[str, Any]:
        return {"value": value, "unit": "MB"}

    return [
        {
            "gpu": index,
            "mem_usage": {
                "total_vram": mib(TOTAL_MIB),
                "used_vram": mib(used_mib),
                "free_vram": mib(TOTAL_MIB - used_mib),
                "total_gtt": mib(1_548_083),
                "used_gtt": mib(15),
            },
        }
        for index in range(len(PCI))
    ]


def amd_version(rocm: str = "7.2.0") -> list[dict]:
    """`amd-smi version --json`."""
    return [{"tool": "AMDSMI Tool", "version": "26.2.1", "rocm_version": rocm, "amdgpu_version": "6.16.6"}]


def newer(entries: list[dict]) -> str:
    """ROCm 7: an object around the list."""
    return json.dumps({"gpu_data": entries}, indent=4)


def older(entries: list[dict]) -> str:
    """ROCm 6: the list itself, after a warning."""
    return "WARNING: User is missing the following required groups: render\n" + json.dumps(entries, indent=4)


def oldest_static() -> str:
    """ROCm 6.0: no architecture, memory as a plain number, NUMA node unknown."""
    entries = amd_static()
    for entry in entries:
        del entry["asic"]["target_graphics_version"], entry["board"]
        entry["vram"] = {"vram_type": "HBM3", "vram_vendor": "N/A", "vram_size_mb": TOTAL_MIB}
        entry["numa"] = {"node": "N/A", "affinity": -1}
        entry["driver"] = {"driver_name": "amdgpu", "version": "N/A"}
    return json.dumps(entries)

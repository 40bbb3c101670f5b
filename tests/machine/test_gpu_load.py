"""Load of GPUs from a sysfs as amdgpu writes it."""

from __future__ import annotations

from pathlib import Path

from kimi_w4a8_eagle3.machine.hardware import GpuLoad, gpu_loads


def card(sysfs: Path, number: int, files: dict[str, str]) -> None:
    device = sysfs / f"devices/pci0000:00/0000:0{number}:00.0"
    for name, text in files.items():
        (device / name).parent.mkdir(parents=True, exist_ok=True)
        (device / name).write_text(f"{text}\n")
    link = sysfs / f"class/drm/card{number}/device"
    link.parent.mkdir(parents=True)
    link.symlink_to(device)


def test_memory_power_and_junction_of_amd_cards(tmp_path: Path) -> None:
    assert gpu_loads(tmp_path) == []
    memory = {"vendor": "0x1002", "mem_info_vram_used": "1024", "mem_info_vram_total": "4096"}
    hot = {"temp1_label": "edge", "temp1_input": "50000", "temp2_label": "junction", "temp2_input": "71500"}
    sensors = {f"hwmon/hwmon3/{name}": text for name, text in {**hot, "power1_input": "612000000"}.items()}
    card(tmp_path, 1, {**memory, **sensors})
    card(tmp_path, 2, memory)
    card(tmp_path, 3, {"vendor": "0x10de"})
    assert gpu_loads(tmp_path) == [
        GpuLoad("0000:01:00.0", 1024, 4096, 612.0, 71.5),
        GpuLoad("0000:02:00.0", 1024, 4096, None, None),
    ]

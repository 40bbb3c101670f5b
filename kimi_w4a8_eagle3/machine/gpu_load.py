"""Memory, power and temperature of this machine's AMD GPUs, read from sysfs (amdgpu) without a driver call."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_AMD = "0x1002"


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
    return [load for card in sorted(cards) if (load := _load(card)) is not None]


def _load(card: Path) -> GpuLoad | None:
    used, total = (_number(card / f"mem_info_vram_{what}") for what in ("used", "total"))
    if _text(card / "vendor") != _AMD or used is None or not total:
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

"""Read the answers of amd-smi in the shapes that its releases print.

A list of GPUs (ROCm 6) or `{"gpu_data": [...]}` (ROCm 7); values as `{"value": 1, "unit": "MB"}`, as numbers or as
`"N/A"`; warnings around the data. Whatever is absent becomes None, never a guess.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

MIB = 1 << 20


@dataclass(frozen=True)
class SmiGpu:
    """One GPU as amd-smi describes it. Memory in bytes; `pci` as `0000:e5:00.0`."""

    pci: str | None = None
    name: str | None = None
    arch: str | None = None
    total: int | None = None
    used: int | None = None
    numa: int | None = None


@dataclass(frozen=True)
class Smi:
    """What amd-smi says; `gpus` is empty when it ran and saw none."""

    gpus: tuple[SmiGpu, ...] = ()
    driver: str | None = None
    rocm: str | None = None


def parse_amd_smi(static: str, memory: str, version: str) -> Smi | None:
    """From `amd-smi static`, `amd-smi metric --mem-usage` and `amd-smi version`, each with --json."""
    entries = _entries(_json(static))
    if entries is None:
        return None
    used = {str(entry.get("gpu")): entry.get("mem_usage") for entry in _entries(_json(memory)) or []}
    gpus = tuple(_amd_gpu(entry, used.get(str(entry.get("gpu")))) for entry in entries)
    driver = next((text for entry in entries if (text := _text(_at(entry, "driver", "version")))), None)
    about = (_entries(_json(version)) or [{}])[0]
    return Smi(gpus, driver or _text(about.get("amdgpu_version")), _text(about.get("rocm_version")))


def _amd_gpu(entry: dict[str, Any], memory: Any) -> SmiGpu:
    memory = memory if isinstance(memory, dict) else {}
    sizes = [memory.get("total_vram"), _at(entry, "vram", "size"), _at(entry, "vram", "vram_size_mb")]
    # `market_name` may be a bare id; the board's product name then says more.
    names = [_text(_at(entry, "asic", "market_name")), _text(_at(entry, "board", "product_name"))]
    return SmiGpu(
        pci=_lower(_at(entry, "bus", "bdf")),
        name=next((name for name in names if name and not name.startswith("0x")), None),
        arch=_arch(_at(entry, "asic", "target_graphics_version")),
        total=next((size for value in sizes if (size := _mebibytes(value))), None),
        used=_mebibytes(memory.get("used_vram")),
        numa=_numa(_at(entry, "numa", "node")),
    )


def _json(text: str) -> Any:
    """The first JSON list or object in a text that may have warnings before and after it; None without one."""
    for match in re.finditer(r"[\[{]", text):
        try:
            return json.JSONDecoder().raw_decode(text, match.start())[0]
        except ValueError:
            continue
    return None


def _entries(data: Any) -> list[dict[str, Any]] | None:
    """The per-GPU objects of an amd-smi answer in either shape."""
    if isinstance(data, dict):
        data = data.get("gpu_data", [data])
    return [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else None


def _at(entry: dict[str, Any], *keys: str) -> Any:
    value: Any = entry
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _text(value: Any) -> str | None:
    text = str(value).strip() if value is not None and not isinstance(value, dict | list) else ""
    return text if text and text.upper() not in ("N/A", "NONE", "UNKNOWN") else None


def _lower(value: Any) -> str | None:
    """A PCI address as sysfs writes it."""
    return text.lower() if (text := _text(value)) else None


def _mebibytes(value: Any) -> int | None:
    """Bytes from `{"value": 262128, "unit": "MB"}`, `262128` or `"262128 MB"`; amd-smi's MB are 2^20 bytes."""
    if isinstance(value, dict):
        value = value.get("value")
    text = _text(value)
    match = re.match(r"(\d+(?:\.\d+)?)", text) if text else None
    return int(float(match.group(1)) * MIB) if match else None


def _numa(value: Any) -> int | None:
    """A NUMA node; -1 means that the firmware did not say."""
    text = _text(value)
    return int(text) if text and re.fullmatch(r"\d+", text) else None


def _arch(value: Any) -> str | None:
    """`gfx942` from `gfx942` or `gfx942:sramecc+:xnack-`."""
    match = re.search(r"gfx[0-9a-f]+", str(value).lower())
    return match.group() if match else None

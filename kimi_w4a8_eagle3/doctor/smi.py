"""Read the answers of amd-smi and rocm-smi in the shapes that their releases print.

amd-smi: a list of GPUs (ROCm 6) or `{"gpu_data": [...]}` (ROCm 7); values as `{"value": 1, "unit": "MB"}`, as numbers
or as `"N/A"`. rocm-smi: `{"card0": {...}, "system": {...}}`, or CSV with a `device` column; key spelling varies.
Both print warnings around the data. Whatever is absent becomes None, never a guess.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

MIB = 1 << 20


@dataclass(frozen=True)
class SmiGpu:
    """One GPU as a tool describes it. Memory in bytes; `pci` as `0000:e5:00.0`."""

    pci: str | None = None
    name: str | None = None
    arch: str | None = None
    total: int | None = None
    used: int | None = None
    numa: int | None = None


@dataclass(frozen=True)
class Smi:
    """What one tool says; `gpus` is empty when it ran and saw none."""

    tool: str
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
    return Smi("amd-smi", gpus, driver or _text(about.get("amdgpu_version")), _text(about.get("rocm_version")))


def parse_rocm_smi_json(text: str) -> Smi | None:
    """From rocm-smi with --json."""
    data = _json(text)
    if not isinstance(data, dict):
        return None
    cards = sorted((name for name in data if re.fullmatch(r"card\d+", name)), key=lambda name: int(name[4:]))
    rows = [data[name] for name in cards if isinstance(data[name], dict)]
    system = data.get("system")
    driver = _pick(system, "driver version") if isinstance(system, dict) else None
    return Smi("rocm-smi", tuple(_rocm_gpu(row) for row in rows), driver)


def parse_rocm_smi_csv(text: str) -> Smi | None:
    """From rocm-smi with --csv; the tables of several options may follow each other."""
    gpus: dict[str, SmiGpu] = {}
    driver = None
    for table in _tables(text):
        for row in table:
            device = row.get("device", "")
            if device == "system":
                driver = _pick(row, "driver version") or driver
            elif re.fullmatch(r"card\d+", device):
                found = {name: value for name, value in vars(_rocm_gpu(row)).items() if value is not None}
                gpus[device] = replace(gpus.get(device, SmiGpu()), **found)
    if not gpus and driver is None:
        return None
    return Smi("rocm-smi", tuple(gpus[name] for name in sorted(gpus, key=lambda name: int(name[4:]))), driver)


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


def _rocm_gpu(row: dict[str, str]) -> SmiGpu:
    names = [_pick(row, key) for key in ("card series", "device name", "card model")]
    return SmiGpu(
        pci=_lower(_pick(row, "pci bus")),
        name=next((name for name in names if name and not name.startswith("0x")), None),
        arch=_arch(_pick(row, "gfx version")),
        total=_integer(_pick(row, "vram total memory (b)")),
        used=_integer(_pick(row, "vram total used memory (b)")),
        numa=_numa(_pick(row, "(topology) numa node")),
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


def _tables(text: str) -> Iterable[list[dict[str, str]]]:
    """CSV tables, each starting at a line that begins with `device`."""
    blocks: list[list[str]] = []
    for line in text.splitlines():
        if line.lower().startswith("device,"):
            blocks.append([line])
        elif blocks and "," in line:
            blocks[-1].append(line)
    return [list(csv.DictReader(io.StringIO("\n".join(block)))) for block in blocks]


def _at(entry: dict[str, Any], *keys: str) -> Any:
    value: Any = entry
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _pick(row: dict[str, Any], key: str) -> str | None:
    """A value by its key in any spelling of upper and lower case."""
    return _text(next((value for name, value in row.items() if name and name.lower() == key), None))


def _text(value: Any) -> str | None:
    text = str(value).strip() if value is not None and not isinstance(value, dict | list) else ""
    return text if text and text.upper() not in ("N/A", "NONE", "UNKNOWN") else None


def _lower(value: Any) -> str | None:
    """A PCI address as sysfs writes it."""
    return text.lower() if (text := _text(value)) else None


def _integer(value: Any) -> int | None:
    text = _text(value)
    return int(float(text)) if text and re.fullmatch(r"-?\d+(\.\d+)?", text) else None


def _mebibytes(value: Any) -> int | None:
    """Bytes from `{"value": 262128, "unit": "MB"}`, `262128` or `"262128 MB"`; amd-smi's MB are 2^20 bytes."""
    if isinstance(value, dict):
        value = value.get("value")
    text = _text(value)
    match = re.match(r"(\d+(?:\.\d+)?)", text) if text else None
    return int(float(match.group(1)) * MIB) if match else None


def _numa(value: Any) -> int | None:
    """A NUMA node; -1 means that the firmware did not say."""
    number = _integer(value)
    return number if number is not None and number >= 0 else None


def _arch(value: Any) -> str | None:
    """`gfx942` from `gfx942` or `gfx942:sramecc+:xnack-`."""
    match = re.search(r"gfx[0-9a-f]+", str(value).lower())
    return match.group() if match else None

"""Versions of the programs that this package runs on, read without importing any of them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Literal

Package = Literal["aiter", "rocm", "sglang", "torch"]
_DISTRIBUTIONS: dict[Package, tuple[str, ...]] = {
    "aiter": ("amd-aiter", "aiter"),
    "sglang": ("sglang",),
    "torch": ("torch",),
}
ROCM = "opt/rocm/.info/version"


def distribution(*names: str) -> str | None:
    """Return the version of the first of these distributions that is installed."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def installed_versions(version: Callable[..., str | None] = distribution, rocm: str | None = None) -> dict[str, str]:
    """Return package -> version of the installed programs.

    rocm: text of ROCm's version file, which is read unless given.
    """
    if rocm is None:
        file = Path("/") / ROCM
        rocm = file.read_text().strip() if file.is_file() else ""
    found: dict[str, str | None] = {name: version(*names) for name, names in _DISTRIBUTIONS.items()}
    found["rocm"] = rocm.partition("-")[0]  # "7.2.0-42"
    return {name: text for name, text in found.items() if text}

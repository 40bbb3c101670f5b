"""Versions of the programs under this package, read without importing any of them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Literal

Package = Literal["aiter", "rocm", "sglang", "torch", "vllm"]
_DISTRIBUTIONS: dict[Package, tuple[str, ...]] = {
    "aiter": ("amd-aiter", "aiter"),
    "sglang": ("sglang",),
    "torch": ("torch",),
    "vllm": ("vllm",),
}
ROCM = "opt/rocm/.info/version"


def distribution(*names: str) -> str | None:
    """The version of the first of these distributions that is installed."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def installed_versions(version: Callable[..., str | None] = distribution, rocm: str | None = None) -> dict[str, str]:
    """Package -> version of what is here. rocm: the text of its version file, read here unless given."""
    if rocm is None:
        file = Path("/") / ROCM
        rocm = file.read_text().strip() if file.is_file() else ""
    found: dict[str, str | None] = {name: version(*names) for name, names in _DISTRIBUTIONS.items()}
    found["rocm"] = rocm.partition("-")[0]  # "7.2.0-42"
    return {name: text for name, text in found.items() if text}

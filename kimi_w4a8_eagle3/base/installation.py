"""Find the folder of an installed package, and its version, without importing it."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path


def find_root(package: str) -> Path | None:
    """Return the folder that contains the package's folder (site-packages, or a checkout); None if not installed."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    locations = list(spec.submodule_search_locations or []) if spec else []
    return Path(locations[0]).resolve().parent if locations else None


def find_version(distributions: tuple[str, ...], root: Path) -> str | None:
    """Return the version that is recorded in `root`; None when nothing is recorded."""
    found = (found for name in distributions for found in metadata.distributions(name=name, path=[str(root)]))
    return next((distribution.version for distribution in found), None)

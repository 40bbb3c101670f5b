"""Find the folder of a package, and its version, without importing it."""

from __future__ import annotations

import importlib.util
import sys
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


def find_version(distributions: tuple[str, ...], root: Path | None) -> str | None:
    """Return the recorded version, searched in `root` if one is given; None when nothing is recorded."""
    path = sys.path if root is None else [str(root)]
    found = (found for name in distributions for found in metadata.distributions(name=name, path=path))
    return next((distribution.version for distribution in found), None)


def first_file(root: Path, candidates: tuple[str, ...]) -> Path | None:
    """Return the first candidate that is a file below `root`, symbolic links resolved."""
    return next(((root / name).resolve() for name in candidates if (root / name).is_file()), None)

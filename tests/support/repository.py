"""The files of this repository, as git lists them."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def tracked() -> tuple[str, ...]:
    """Return the paths of all files that git tracks."""
    return listed(ROOT)


def listed(checkout: Path) -> tuple[str, ...]:
    """Return the tracked files of a checkout, without those that were deleted."""
    names = subprocess.run(["git", "ls-files"], cwd=checkout, capture_output=True, text=True, check=True).stdout
    return tuple(name for name in names.splitlines() if (checkout / name).is_file())


@cache
def known_paths() -> frozenset[str]:
    """Return every file and folder, and every end of their paths: `recipe/launch.py` is one of two names."""
    parts = [Path(name).parts for name in tracked()]
    heads = {names[:end] for names in parts for end in range(1, len(names) + 1)}
    return frozenset("/".join(head[start:]) for head in heads for start in range(len(head)))

"""Hides installed packages from this process: they are on the disk, and no import, find_spec or metadata finds them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any


def hide_packages(hides_module: Callable[[ModuleSpec], bool], hides_distribution: Callable[[str], bool]) -> None:
    """Hide top-level modules by their spec and distributions by their name, from here on."""

    class Remaining:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
            spec = PathFinder.find_spec(name, path, target)
            return None if spec is None or (path is None and hides_module(spec)) else spec

        @staticmethod
        def find_distributions(context: Any) -> Any:
            return (one for one in PathFinder.find_distributions(context) if not hides_distribution(one.name))

        invalidate_caches = PathFinder.invalidate_caches

    sys.meta_path[sys.meta_path.index(PathFinder)] = Remaining  # type: ignore[call-overload]

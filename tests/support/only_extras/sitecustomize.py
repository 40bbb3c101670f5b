"""Makes this interpreter and its children see what `pip install '.[EXTRAS]'` installs, and nothing else.

In use where this folder is on PYTHONPATH; ONLY_EXTRAS names the extras, separated by commas. The packages follow from
the metadata of this package and of what it asks for.
"""

from __future__ import annotations

import os
import sysconfig
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.hiding import hide_packages

PACKAGE = "kimi-w4a8-eagle3"
SITE = Path(sysconfig.get_path("purelib"))


def installed(extras: frozenset[str]) -> dict[str, metadata.Distribution]:
    """Return the distributions that pip would install, by canonical name."""
    found: dict[str, metadata.Distribution] = {}
    asked: dict[str, frozenset[str]] = {}
    todo = [(PACKAGE, extras)]
    while todo:
        name, wanted = todo.pop()
        if name in asked and wanted <= asked[name]:
            continue
        asked[name] = wanted | asked.get(name, frozenset())
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # this environment lacks it, too
            continue
        for line in found[name].requires or []:
            one = Requirement(line)
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in (*asked[name], "")):
                todo.append((canonicalize_name(one.name), frozenset(one.extras)))
    return found


def modules(distribution: metadata.Distribution) -> set[str]:
    """Return the names of its top-level modules."""
    declared = distribution.read_text("top_level.txt")
    if declared:
        return set(declared.split())
    return {file.parts[0].partition(".")[0] for file in distribution.files or []}


def hide_others(extras: frozenset[str]) -> None:
    """Hide every package of site-packages that these extras do not bring."""
    kept = installed(extras)
    names = set().union(*map(modules, kept.values()))

    def is_other(spec: ModuleSpec) -> bool:
        places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or [])
        return spec.name not in names and any(Path(place).is_relative_to(SITE) for place in places)

    hide_packages(is_other, lambda name: canonicalize_name(name) not in kept)


hide_others(frozenset(filter(None, os.environ["ONLY_EXTRAS"].split(","))))

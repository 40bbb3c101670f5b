"""Each package imports only what its side of the house may, and no files import each other in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAME, LAB, LAPTOP = "kimi_w4a8_eagle3", "kimi_w4a8_lab", "kimi_w4a8_laptop"
SOURCES = {
    path.relative_to(ROOT).with_suffix("").as_posix(): path.read_text()
    for folder in (NAME, LAB, LAPTOP)
    for path in (ROOT / folder).rglob("*.py")
}
# What a package is imported by: all other modules may not.
ALLOWED: dict[str, tuple[str, ...]] = {
    "sglang": (f"{NAME}/sglang_plugin/", f"{LAB}/with_sglang/", f"{LAPTOP}/"),
    "flydsl": (f"{NAME}/moe/flydsl/",),
    LAB: (f"{LAB}/", f"{LAPTOP}/"),
    LAPTOP: (f"{LAPTOP}/",),
    "proof": (),
}


@cache
def imports(module: str, source: str) -> tuple[str, ...]:
    """Dotted names that a module imports, relative ones made absolute; also those inside of functions."""
    return tuple(_imports(module.split("/")[:-1], source))


def _imports(package: list[str], source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def forbidden(module: str, source: str) -> set[str]:
    """The packages that this module imports and may not."""
    tops = {name.split(".")[0] for name in imports(module, source)}
    return {package for package, folders in ALLOWED.items() if package in tops and not module.startswith(folders)}


def graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """By file, the files that it imports."""
    known = {name.removesuffix("/__init__") for name in sources}
    out: dict[str, set[str]] = {}
    for module, source in sources.items():
        names = (name.replace(".", "/") for name in imports(module, source))
        found = {name if name in known else name.rpartition("/")[0] for name in names}
        out[module.removesuffix("/__init__")] = (found & known) - {module.removesuffix("/__init__")}
    return out


def circle(sources: Mapping[str, str]) -> list[str]:
    """Files that import each other in a circle; a package's __init__ does not count as part of its modules."""
    packages = {name.removesuffix("/__init__") for name in sources if name.endswith("/__init__")}
    links = {name: found - packages for name, found in graph(sources).items() if name not in packages}
    try:
        list(TopologicalSorter(links).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_module_imports_what_it_may_not() -> None:
    assert {module: found for module, source in SOURCES.items() if (found := forbidden(module, source))} == {}


def test_a_planted_import_is_found_in_every_module() -> None:
    for package, folders in ALLOWED.items():
        for line in (f"import {package}.x", f"def late():\n    from {package} import x"):
            for module in SOURCES:
                assert forbidden(module, line) == (set() if module.startswith(folders) else {package}), module


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circle(SOURCES) == []


def test_a_planted_circle_is_found() -> None:
    planted = {**SOURCES, f"{NAME}/base/files": SOURCES[f"{NAME}/base/files"] + "\nfrom .run_dir import RECORD\n"}
    assert {f"{NAME}/base/files", f"{NAME}/base/run_dir"} <= set(circle(planted))

"""Collects the test modules with each optional part hidden in turn: `python hidden_parts.py` prints JSON.

    {part: {"modules": how many were collected, "output": pytest's words, "status": its exit status}}

Only modules that reach a part when they are imported can miss it, so a graph of the imports picks them. Each part has a
process of its own, forked from one that has imported what no part is behind, so that all of them take seconds.
"""

from __future__ import annotations

import ast
import gc
import importlib
import io
import json
import os
import shutil
import sys
from contextlib import redirect_stdout
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
sys.path[:0] = [str(ROOT), str(TESTS)]  # `proof` is the package there, not the folder of its tests

# Imported once for all forks: what no part is behind.
import httpx  # noqa: E402, F401
import hypothesis.strategies  # noqa: E402, F401
import jsonschema  # noqa: E402, F401
import openai  # noqa: E402, F401
import pydantic  # noqa: E402, F401
import pytest  # noqa: E402
import pytest_timeout  # noqa: E402
import torch  # noqa: E402, F401
import typer.testing  # noqa: E402, F401
import xdist.plugin  # noqa: E402
from base.packages import imports, nodes  # noqa: E402
from support.hiding import hide_packages  # noqa: E402
from support.optional_parts import PARTS, PROGRAMS  # noqa: E402

# As modules: pytest looks for one that is named by `-p` in the metadata of every distribution.
PLUGINS = (pytest_timeout, xdist.plugin)
OWNERS = metadata.packages_distributions()  # once for all forks: it reads every distribution's files
ASKING = {"which", "find_spec", "importorskip", "version"}


def name_of(path: Path) -> str:
    """The name under which a file is imported here."""
    if path.is_relative_to(TESTS):
        return path.stem if path.parent.name != "support" else f"support.{path.stem}"
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FOLDERS = (TESTS, ROOT / "kimi_w4a8_eagle3", ROOT / "kimi_w4a8_lab")
FILES = {name_of(path): path for folder in FOLDERS for path in sorted(folder.rglob("*.py"))}


@cache
def needs(name: str) -> frozenset[str]:
    """Modules that a module of ours imports, and parts that it names by a string."""
    path, text = FILES[name], FILES[name].read_text()
    home = str(path.relative_to(TESTS if path.is_relative_to(TESTS) else ROOT))
    asked = {
        str(argument.value)
        for call in nodes(text)
        if isinstance(call, ast.Call) and getattr(call.func, "attr", getattr(call.func, "id", "")) in ASKING
        for argument in call.args
        if isinstance(argument, ast.Constant)
    }
    return frozenset(asked | {imported.target for imported in imports(home, text) if imported.at_import})


def reached(name: str) -> set[str]:
    """Everything that importing a module of ours may touch."""
    found, todo = set(), [name]
    while todo:
        words = todo.pop().split(".")
        for prefix in (".".join(words[:end]) for end in range(1, len(words) + 1)):
            if prefix not in found:
                found.add(prefix)
                todo += needs(prefix) if prefix in FILES else ()
    return found


def hide(part: str) -> None:
    """From here on this process finds neither module, distribution nor program of that name."""
    owners = OWNERS.get(part, [])
    which = shutil.which
    loaded = [name for name in sys.modules if name.partition(".")[0] == part]
    assert not loaded, f"{part} is imported before it could be hidden"
    hide_packages(lambda spec: spec.name == part, lambda name: name in owners)
    shutil.which = lambda cmd, *args, **kwargs: None if cmd == part else which(cmd, *args, **kwargs)


def collect(part: str, modules: list[str]) -> dict[str, Any]:
    """Collect `modules` in a fork of this process in which `part` is hidden."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        hide(part)
        output = io.StringIO()
        with redirect_stdout(output):
            status = pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *modules], PLUGINS)
        with os.fdopen(writer, "w") as pipe:
            json.dump({"modules": len(modules), "status": int(status), "output": output.getvalue()}, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return dict(json.loads(answer))


if __name__ == "__main__":
    os.chdir(ROOT)
    os.environ.pop("CI", None)  # there a test that is skipped for want of a part is a failure
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # some import a part, all cost seconds
    parts = {*PARTS, *PROGRAMS}
    tests = {path: reached(name) for name, path in FILES.items() if name.startswith("test_")}
    for name in sorted({file for touched in tests.values() if touched & parts for file in touched & FILES.keys()}):
        if "." in name and not reached(name) & parts:  # without a dot: beside the tests, where only pytest looks
            importlib.import_module(name)
    gc.freeze()  # a fork that collected garbage would look at all modules, and copy their pages
    found = {}
    for part in (*PARTS, *PROGRAMS):
        modules = [str(path) for path, touched in tests.items() if part in touched]
        found[part] = collect(part, modules) if modules else {"modules": 0, "status": 0, "output": ""}
    json.dump(found, sys.stdout)

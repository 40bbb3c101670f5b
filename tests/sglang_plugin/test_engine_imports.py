"""What one process of an engine imports of this package, in the order of `engine_imports.txt`.

A scheduler computes, and the main process also holds the HTTP server. The program below imports as they do: the module
that SGLang's children import first, the plugin, and both MoE backends of a GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
from support.sglang_program import environment

pytestmark = pytest.mark.slow  # two imports of SGLang that no other test shares
LIST = Path(__file__).with_name("engine_imports.txt")
KERNELS = "kimi_w4a8_eagle3.moe.flydsl.kernels"
PROGRAM = """
import json, multiprocessing, sys
import kimi_w4a8_eagle3.sglang_plugin.run_module

def imported():
    from sglang.srt.plugins import load_plugins
    from kimi_w4a8_eagle3.moe.dispatch import load_backend
    load_plugins()
    load_backend("flydsl", {})
    load_backend("triton", {})
    return sorted(sys.modules)

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as scheduler:
        print(json.dumps({"scheduler": scheduler.apply(imported), "main process": imported()}))
"""


@cache
def modules(folder: Path) -> dict[str, set[str]]:
    """Return the modules that each process has imported."""
    (folder / "engine.py").write_text(PROGRAM)
    words = [sys.executable, str(folder / "engine.py")]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {process: set(found) for process, found in json.loads(done.stdout.splitlines()[-1]).items()}


def listed(title: str, names: set[str]) -> list[str]:
    """Return a line for each folder of this package, with its modules."""
    folders = defaultdict[str, list[str]](list)
    for name in sorted(name for name in names if name.startswith("kimi_w4a8_eagle3.")):
        folder, _, module = name.rpartition(".")
        folders[folder.removeprefix("kimi_w4a8_eagle3").removeprefix(".")].append(module)
    return [title, *(f"  {folder or '.'}: {' '.join(found)}" for folder, found in folders.items())]


def test_an_engine_imports_what_is_listed_and_nothing_else(tmp_path_factory: pytest.TempPathFactory) -> None:
    found = modules(tmp_path_factory.getbasetemp())
    lines = listed("every process", found["scheduler"])
    lines += listed("the HTTP server's process, too", found["main process"] - found["scheduler"])
    assert "\n".join(lines) + "\n" == LIST.read_text(), f"the new list of {LIST.name}:\n" + "\n".join(lines)
    assert found["scheduler"] <= found["main process"]


def test_no_server_imports_what_emits_kernels(tmp_path_factory: pytest.TempPathFactory) -> None:
    found = modules(tmp_path_factory.getbasetemp())
    for process, names in found.items():
        assert {"kimi_w4a8_eagle3.moe.flydsl.backend", "kimi_w4a8_eagle3.moe.triton.backend"} <= names, process
        assert not [name for name in names if name.startswith((KERNELS, "flydsl", "kimi_w4a8_lab"))], process

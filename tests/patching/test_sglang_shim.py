from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from patch_trees import write

from kimi_w4a8_eagle3.errors import KimiError
from kimi_w4a8_eagle3.patching import patcher, sglang_shim
from kimi_w4a8_eagle3.patching.manifest import load_manifest
from kimi_w4a8_eagle3.patching.patcher import Status


@pytest.fixture(params=["shim", "sglang"])
def framework(request: pytest.FixtureRequest) -> Any:
    """Our registry, and SGLang's own where it is installed: the same hooks must do the same."""
    module: Any = sglang_shim if request.param == "shim" else _own_registry()
    module.HookRegistry.reset()
    yield module
    module.HookRegistry.reset()


def _own_registry() -> Any:
    """SGLang's registry from its file: importing the package would take seconds and is not needed."""
    spec = importlib.util.find_spec("sglang")
    path = Path((spec and spec.origin) or "absent").parent / "srt/plugins/hook_registry.py"
    if not path.is_file():
        pytest.skip("no sglang with a plugin framework here")
    own = importlib.util.spec_from_file_location("own_hook_registry", path)
    assert own is not None and own.loader is not None
    module = importlib.util.module_from_spec(own)
    own.loader.exec_module(module)
    return module


@pytest.fixture
def target() -> Any:
    """A module with a function, a class, and another module that imported the function by name."""
    source = textwrap.dedent(
        """
        def double(x, extra=0): return 2 * x + extra
        class Pool:
            size = 1
            def grow(self, by): self.size += by; return self.size
            @classmethod
            def make(cls, size): pool = cls(); pool.size = size; return pool
            @staticmethod
            def limit(x): return min(x, 10)
        """
    )
    module, importer = ModuleType("shim_target"), ModuleType("shim_importer")
    exec(source, module.__dict__)
    importer.alias = module.double  # type: ignore[attr-defined]
    sys.modules["shim_target"], sys.modules["shim_importer"] = module, importer
    yield module
    del sys.modules["shim_target"], sys.modules["shim_importer"]


def test_hook_kinds(framework: Any, target: Any) -> None:
    kinds = framework.HookType
    register = framework.HookRegistry.register
    register("shim_target.double", lambda x, extra=0: ((x + 1,), {"extra": extra}), kinds.BEFORE)
    register("shim_target.double", lambda result, *a, **k: result + 100, kinds.AFTER)
    register("shim_target.double", lambda original, *a, **k: -original(*a, **k), kinds.AROUND)
    register("shim_target.Pool.make", lambda original, cls, size: original(cls, size + 5), kinds.AROUND)
    register("shim_target.Pool.limit", lambda x: x, kinds.REPLACE)
    framework.plugin_hook("shim_target.Pool.grow")(lambda result, self, by: None)  # AFTER, keeps the result
    framework.HookRegistry.apply_hooks()
    assert target.double(1, extra=3) == -(2 * 2 + 3 + 100)
    assert sys.modules["shim_importer"].alias is target.double  # type: ignore[attr-defined]
    assert target.Pool.make(1).size == 6
    assert target.Pool.limit(99) == target.Pool().limit(99) == 99
    assert target.Pool().grow(2) == 3
    once = target.double
    framework.HookRegistry.apply_hooks()
    assert target.double is once


def test_a_class_is_replaced_before_its_methods_are_wrapped(framework: Any, target: Any) -> None:
    class Bigger(target.Pool):
        def grow(self, by: int) -> int:
            return super().grow(10 * by)

    framework.HookRegistry.register(
        "shim_target.Pool.grow", lambda f, self, by: f(self, by) + 1000, framework.HookType.AROUND
    )
    framework.HookRegistry.register("shim_target.Pool", Bigger, framework.HookType.REPLACE)
    framework.HookRegistry.apply_hooks()
    assert target.Pool is Bigger
    assert target.Pool().grow(1) == 1011


def test_a_class_can_only_replace(framework: Any) -> None:
    with pytest.raises(TypeError, match="REPLACE"):
        framework.HookRegistry.register("shim_target.Pool", int, framework.HookType.AROUND)


def test_a_missing_target_is_an_error_not_a_log_line(target: Any) -> None:
    sglang_shim.HookRegistry.reset()
    sglang_shim.HookRegistry.register("shim_target.absent", print)
    with pytest.raises(KimiError, match="does not exist"):
        sglang_shim.HookRegistry.apply_hooks()
    sglang_shim.HookRegistry.reset()


PLUGIN = """\
from sglang.srt.plugins import HookRegistry
from sglang.srt.plugins.hook_registry import HookType

def register():
    HookRegistry.register("sglang.srt.managers.scheduler.work", lambda original, x: original(x) + 1, HookType.AROUND)

def broken():
    raise RuntimeError("no such GPU")
"""


@pytest.fixture
def patched_sglang(sglang_tree: Path) -> Path:
    """An old SGLang, patched, beside an installed plugin."""
    scheduler = sglang_tree / "sglang/srt/managers/scheduler.py"
    scheduler.write_text("def work(x):\n    return x\n\n\ndef run_scheduler_process(queue):\n    queue.put(work(41))\n")
    write(
        sglang_tree,
        {
            "probe_plugin.py": PLUGIN,
            "probe-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: probe\nVersion: 1.0\n",
            "probe-1.0.dist-info/entry_points.txt": "[sglang.srt.plugins]\nprobe = probe_plugin:register\n",
        },
    )
    (plugins,) = (patch for patch in load_manifest() if patch.id == "sglang-load-plugins")
    assert patcher.apply(plugins, sglang_tree).status is Status.APPLIED
    return sglang_tree


MAIN = """\
import multiprocessing as mp
from sglang.srt.managers.scheduler import run_scheduler_process

if __name__ == "__main__":
    context = mp.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=run_scheduler_process, args=(queue,))
    process.start()
    process.join()
    print(process.exitcode, queue.get(timeout=5) if process.exitcode == 0 else "")
"""


def run_server(site: Path, plugins: str) -> subprocess.CompletedProcess[str]:
    (site / "main.py").write_text(MAIN)
    environment = {"PYTHONPATH": f"{site}:{Path(__file__).parents[2]}", "SGLANG_PLUGINS": plugins, "PATH": ""}
    return subprocess.run(
        [sys.executable, site / "main.py"], env=environment, capture_output=True, text=True, timeout=60
    )


def test_a_spawned_process_runs_with_the_plugin(patched_sglang: Path) -> None:
    """The whole chain: patched file, spawned process, entry point, hook."""
    result = run_server(patched_sglang, "probe")
    assert result.stdout.split() == ["0", "42"], result.stderr


def test_sglang_plugins_restricts_what_is_loaded(patched_sglang: Path) -> None:
    assert run_server(patched_sglang, "another").stdout.split() == ["0", "41"]


def test_a_plugin_that_fails_ends_the_process(patched_sglang: Path) -> None:
    entry_points = patched_sglang / "probe-1.0.dist-info/entry_points.txt"
    entry_points.write_text(entry_points.read_text().replace(":register", ":broken"))
    result = run_server(patched_sglang, "probe")
    assert result.stdout.split() == ["1"]
    assert "the plugin probe failed to load: no such GPU" in result.stderr


def test_a_release_with_its_own_framework_uses_it(patched_sglang: Path) -> None:
    write(patched_sglang, {"sglang/srt/plugins/__init__.py": "def load_plugins():\n    raise SystemExit(7)\n"})
    assert run_server(patched_sglang, "").stdout.split() == ["7"]

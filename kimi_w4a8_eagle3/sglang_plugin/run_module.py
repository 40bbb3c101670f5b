"""`python -m kimi_w4a8_eagle3.sglang_plugin.run_module MODULE ARGS`: run one of SGLang's programs.

Used for engines on a CPU (`sglang.launch_server`) and for programs that measure engines (`sglang.benchmark.serving`).
SGLang imports its CPU operators before it loads plugins. This module therefore installs those of kimi-w4a8-laptop at
its own import, if that package is installed. A child that the server spawns imports this module again (as
`__mp_main__`) before it unpickles its work, so it gets them too. A forked child inherits them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import entry_points

from kimi_w4a8_eagle3.sglang_plugin.upkeep import full_disk, orphans

orphans.end_with_parent(spawning=__name__ == "__mp_main__")
full_disk.install()
_laptop = {part.name: part for part in entry_points(group="kimi_w4a8_eagle3.laptop")}
if "operators" in _laptop:
    _laptop["operators"].load()()

_WITHOUT_MODEL = (
    "sglang.benchmark.", "kimi_w4a8_lab.with_sglang.bench_", "kimi_w4a8_eagle3.sglang_plugin.check_arguments",
)  # fmt: skip


def run(module: str, arguments: Sequence[str]) -> None:
    """Run a module as the program of this process."""
    import runpy  # a spawned child of an engine imports this module and does not need it

    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=False)


def _imports(program: str) -> AbstractContextManager[None]:
    """Return a context in which a program that has no model imports less of SGLang, if laptop is installed."""
    lean = "lean_imports" in _laptop and program.startswith(_WITHOUT_MODEL)
    return _laptop["lean_imports"].load()() if lean else nullcontext()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m kimi_w4a8_eagle3.sglang_plugin.run_module MODULE [ARGS...]")
    with _imports(sys.argv[1]):
        run(sys.argv[1], sys.argv[2:])

"""The final gfx942 assembly of FlyDSL kernels, for the interpreter and for counting; kept on disk."""

from __future__ import annotations

import hashlib
import inspect
import io
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.files import write_atomic
from kimi_w4a8_eagle3.moe.flydsl import toolchain


def assembly(build: Callable[[Any], Any], config: Any) -> str:
    """The final gfx942 assembly of the launcher `build(config)`; from the cache if it is there.

    Raises KimiError when FlyDSL or a linker is missing, or when the configuration has a `problem()`.
    """
    problem = toolchain.flydsl_problem() or config.problem()
    if problem:
        raise KimiError(problem, where="compiling FlyDSL kernels", expected="a supported FlyDSL and configuration")
    name = hashlib.sha256(repr(config).encode()).hexdigest()[:16]
    stored = toolchain.cache_dir() / toolchain.source_key() / f"{type(config).__name__}-{name}.s"
    if not stored.exists():
        text = _compile(build(config))
        stored.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(stored, text)
    return stored.read_text()


def _compile(launcher: Any) -> str:
    parameters = [p for p in inspect.signature(launcher.func).parameters if p != "stream"]
    with tempfile.TemporaryDirectory(prefix="flydsl-") as dump:
        options = {
            "COMPILE_ONLY": "1",
            "ARCH": toolchain.ARCH,
            "FLYDSL_DEBUG_DUMP_ASM": "1",
            "FLYDSL_DUMP_DIR": dump,
            "FLYDSL_RUNTIME_ENABLE_CACHE": "0",
        }
        with toolchain.environment(**options), toolchain.linking(), redirect_stdout(io.StringIO()):
            launcher(*range(1, len(parameters) + 1))
        found = list(Path(dump).glob("*/*_final_isa.s"))
        if len(found) != 1:
            raise KimiError("FlyDSL compiled a kernel but left no assembly", where=dump)
        return found[0].read_text()

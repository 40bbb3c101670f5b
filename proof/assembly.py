"""The final gfx942 assembly of the backend's kernels, for the interpreter and for counting; kept on disk."""

from __future__ import annotations

import hashlib
import io
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.files import write_atomic
from kimi_w4a8_eagle3.moe.flydsl import toolchain
from kimi_w4a8_eagle3.moe.flydsl.objects import cache_dir, source_hash
from kimi_w4a8_eagle3.moe.flydsl.toolchain import launcher_of

from . import sums

_SUM_KERNELS = Path(__file__).with_name("sum_kernels.py")


def assembly(config: Any) -> str:
    """The final gfx942 assembly of a kernel; from the cache if it is there.

    Raises KimiError when FlyDSL or a linker is missing, or when the configuration has a `problem()`.
    """
    problem = toolchain.flydsl_problem() or config.problem()
    if problem:
        raise KimiError(problem, where="compiling FlyDSL kernels", expected="a supported FlyDSL and configuration")
    key = f"{toolchain.metadata.version('flydsl')} {source_hash()} {_SUM_KERNELS.read_text()} {config!r}"
    stored = cache_dir() / "assembly" / f"{type(config).__name__}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.s"
    if not stored.exists():
        text = _compile(config)
        stored.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(stored, text)
    return stored.read_text()


def _compile(config: Any) -> str:
    _register()
    with tempfile.TemporaryDirectory(prefix="flydsl-") as dump:
        with (
            # Where each operation was written is printed and parsed between all passes, and never changes the code.
            toolchain.environment(FLYDSL_DEBUG_DUMP_ASM="1", FLYDSL_DUMP_DIR=dump, FLYDSL_DEBUG_MAX_LOC_DEPTH="1"),
            redirect_stdout(io.StringIO()),
        ):
            toolchain.compiled(launcher_of(config))
        found = list(Path(dump).glob("*/*_final_isa.s"))
        if len(found) != 1:
            raise KimiError("FlyDSL compiled a kernel but left no assembly", where=dump)
        return found[0].read_text()


def _register() -> None:
    """Let FlyDSL compile the configurations of `proof.sums`."""
    from kimi_w4a8_eagle3.moe.flydsl.launcher import KERNELS  # optional: flydsl

    from .sum_kernels import stage1_sums, stage2_given, stage2_sums

    KERNELS[sums.Stage1Sums] = *KERNELS[sums.Stage1Config][:2], stage1_sums
    KERNELS[sums.Stage2Sums] = *KERNELS[sums.Stage2Config][:2], stage2_sums
    KERNELS[sums.Stage2Given] = *KERNELS[sums.Stage2Config][:2], stage2_given

"""The final gfx942 assembly of the backend's kernels, for the interpreter and for counting; kept on disk."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.files import write_atomic
from kimi_w4a8_eagle3.moe.flydsl.kernels import toolchain
from kimi_w4a8_eagle3.moe.flydsl.objects import cache_dir, source_hash

from . import sums

_SUM_KERNELS = Path(__file__).with_name("sum_kernels.py")


def assembly(config: Any) -> str:
    """The final gfx942 assembly of a kernel; from the cache if it is there.

    Raises KimiError when FlyDSL or a linker is missing, or when the configuration has a `problem()`.
    """
    if problem := config.problem():
        raise KimiError(problem, where="compiling FlyDSL kernels", expected="a supported configuration")
    key = f"{toolchain.flydsl_version()} {source_hash()} {_SUM_KERNELS.read_text()} {config!r}"
    stored = cache_dir() / "assembly" / f"{type(config).__name__}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.s"
    if not stored.exists():
        text = _compile(config)
        stored.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(stored, text)
    return stored.read_text()


def _compile(config: Any) -> str:
    """Let the last pass write assembly instead of a code object; FlyDSL's own dump prints and parses all passes."""
    from flydsl.compiler import jit_function  # optional

    from kimi_w4a8_eagle3.moe.flydsl.kernels.launcher import launcher_of  # optional: flydsl

    _register()
    run_pipeline = jit_function._run_pipeline

    def to_assembly(module: Any, fragments: list[str], **options: bool) -> None:
        fragments[-1] = fragments[-1].replace("format=fatbin", "format=isa")
        run_pipeline(module, fragments, **options)

    try:
        jit_function._run_pipeline = to_assembly
        with toolchain.environment(FLYDSL_DEBUG_MAX_LOC_DEPTH="1"):  # where an operation was written changes no code
            text = toolchain.compiled(launcher_of(config)).decode()
    finally:
        jit_function._run_pipeline = run_pipeline
    if not text.lstrip().startswith("."):
        raise KimiError("FlyDSL compiled a kernel but left no assembly", where=repr(config))
    return text


def _register() -> None:
    """Let FlyDSL compile the configurations of `proof.sums`."""
    from kimi_w4a8_eagle3.moe.flydsl.kernels.launcher import KERNELS  # optional: flydsl

    from .sum_kernels import stage1_sums, stage2_sums

    KERNELS[sums.Stage1Sums] = *KERNELS[sums.Stage1Config][:2], stage1_sums
    KERNELS[sums.Stage2Sums] = *KERNELS[sums.Stage2Config][:2], stage2_sums

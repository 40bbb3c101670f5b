"""Compile the attention modules of AITER that its prebuilt installation leaves out and the recipes need.

    python3 build_aiter.py gfx942        where AITER can be written to, after `kimi-w4a8 patch`; needs hipcc, no GPU

SGLang's images are built with PREBUILD_KERNELS=1, which excludes them, so that AITER would compile them when the first
request needs them: minutes, and in a folder that only root can write to. Which module a call needs, and what it is
called, only AITER knows, and both change between its releases. So this makes SGLang's calls with tensors of the CPU:
AITER compiles and loads the module, and then refuses the tensors.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def without_a_gpu(arch: str) -> None:
    """Let AITER take this machine for one with `arch`, which it asks `rocminfo` for when it is imported."""
    folder = Path(tempfile.mkdtemp())
    program = folder / "rocminfo"
    program.write_text(f"#!/bin/sh\necho '  Name: {arch}'\n")
    program.chmod(0o755)
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    os.environ["GPU_ARCHS"] = arch
    os.environ["AITER_AOT_IMPORT"] = "1"  # `import aiter` without the operators that ask the GPU when imported


def calls() -> dict[str, Callable[[], Any]]:
    """Return the needed builds, each with a call as SGLang's attention makes it, on two tokens."""
    import torch  # after the environment is set, like AITER
    from aiter.ops.mha import flash_attn_varlen_func, mha_batch_prefill_func

    def tokens(heads: int, size: int) -> torch.Tensor:
        return torch.zeros(2, heads, size, dtype=torch.bfloat16)

    ends = torch.tensor([0, 2], dtype=torch.int32)
    pages = torch.zeros(2, dtype=torch.int32)

    def draft(longest: int) -> Any:
        rows = tokens(8, 128), tokens(1, 128), tokens(1, 128)
        return mha_batch_prefill_func(*rows, ends, ends, pages, longest, 2, causal=True)

    return {
        "prefill of the draft": lambda: draft(2),
        "prefill of the draft, one token": lambda: draft(1),  # AITER leaves the mask out
        "pictures": lambda: flash_attn_varlen_func(tokens(2, 72), tokens(2, 72), tokens(2, 72), ends, ends, 2, 2),
    }


def build(purpose: str, call: Callable[[], Any]) -> str:
    """Make one call; returns the name of the module that it loaded, or ends the program."""
    loaded, error = set(sys.modules), None
    try:
        call()
    except Exception as refusal:  # of the tensors, or the reason why there is no module
        error = refusal
    # In AITER's own package: without AITER_JIT_DIR a module is looked for there and nowhere else.
    modules = [name for name in set(sys.modules) - loaded if name.startswith("aiter.jit.mha_")]
    if not modules:
        sys.exit(f"build_aiter.py: AITER built no module for: {purpose}\n  {type(error).__name__}: {error}")
    return modules[0].rpartition(".")[2]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: build_aiter.py ARCH")
    without_a_gpu(sys.argv[1])
    for needed_for, sglangs_call in calls().items():
        name = build(needed_for, sglangs_call)
        folder = Path(sys.modules[f"aiter.jit.{name}"].__file__ or "").parent
        shutil.rmtree(folder / "build" / name, ignore_errors=True)  # its sources and objects
        print(f"{folder / name}.so: {needed_for}")

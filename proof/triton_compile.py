"""Compile the Triton backend's kernels for a GPU that need not be there.

The backend's own launch code runs on `meta` tensors with a launcher that compiles instead of launching, so that the
specialisation is the one that serving asks for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.moe.contract import MoeShape, PreparedMoe
from kimi_w4a8_eagle3.moe.triton import kernels as triton_kernels
from kimi_w4a8_eagle3.moe.triton.backend import LAYOUT, TritonBackend


@dataclass(frozen=True)
class Compiled:
    """One kernel with the constants that it was compiled for."""

    name: str
    constants: dict[str, Any]
    kernel: Any  # triton.compiler.CompiledKernel: .asm, .metadata


def target_of(arch: str) -> GPUTarget:
    """`gfx942` -> a HIP target, `sm_90` -> a CUDA target."""
    if re.fullmatch(r"gfx9[0-9a-f]{2}", arch):
        return GPUTarget("hip", arch, 64)
    if re.fullmatch(r"sm_\d{2,3}", arch):
        return GPUTarget("cuda", int(arch[3:]), 32)
    raise KimiError(f"unknown GPU architecture {arch!r}", expected="gfx942, gfx950, sm_80, sm_90, ...")


def compile_moe(shape: MoeShape, arch: str, tokens: list[int]) -> list[Compiled]:
    """Compile every kernel that a forward of these token counts launches on `arch`; each once."""
    found: dict[str, Compiled] = {}

    def compile_only(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        compiled = kernel.warmup(*arguments, grid=grid, **constants)
        found.setdefault(compiled.hash, Compiled(kernel.__name__, constants, compiled))

    backend = TritonBackend(arch=arch, launch=compile_only)
    with offline_driver(target_of(arch)):
        for count in tokens:
            backend.forward(*_arguments(shape, count))
    return list(found.values())


class _OfflineDriver:
    """The part of a Triton driver that compilation asks for."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def offline_driver(target: GPUTarget) -> Iterator[None]:
    """Triton compiles for `target` within; JIT functions keep their kernels by device, so these caches are dropped."""
    jitted = [value for value in vars(triton_kernels).values() if isinstance(value, triton.JITFunction)]
    saved = [function.device_caches.copy() for function in jitted]
    previous = driver._active
    try:
        driver.set_active(_OfflineDriver(target))
        for function in jitted:
            function.device_caches.clear()
        yield
    finally:
        driver._active = previous
        for function, cache in zip(jitted, saved, strict=True):
            function.device_caches.clear()
            function.device_caches.update(cache)


def _arguments(shape: MoeShape, tokens: int) -> tuple[torch.Tensor, PreparedMoe, torch.Tensor, torch.Tensor]:
    def tensor(*size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device="meta")

    experts, hidden, inter, block = shape.num_experts, shape.hidden, shape.inter, shape.weights.block
    moe = PreparedMoe(
        shape=shape,
        layout=LAYOUT,
        w13=tensor(experts, 2 * inter, hidden // 2, dtype=torch.int8),
        w2=tensor(experts, hidden, inter // 2, dtype=torch.int8),
        s13=tensor(experts, 2 * inter, dtype=torch.float32),
        s2=tensor(experts * (hidden + 1), dtype=torch.float32),
        shift13=tensor(experts, 2 * inter, hidden // block, dtype=torch.uint8) if block else None,
        shift2=tensor(experts, hidden, inter // block, dtype=torch.uint8) if block else None,
    )
    return (
        tensor(tokens, hidden, dtype=torch.bfloat16),
        moe,
        tensor(tokens, shape.top_k, dtype=torch.float32),
        tensor(tokens, shape.top_k, dtype=torch.int32),
    )

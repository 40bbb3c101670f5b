"""Triton on the virtual node: the driver says gfx942, and its interpreter runs each kernel as one launch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from ctypes import c_void_p
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import interpreter

from kimi_w4a8_eagle3.sampling.draw import draw_rows

from . import library
from .kernel_launch import Touched, launch, require_device
from .library import DRAW

_SIZES = {"max_shared_mem": 65536, "multiprocessor_count": 304, "warpSize": 64}


class Driver:
    """The part of Triton's driver that SGLang and the interpreter ask."""

    utils = SimpleNamespace(get_device_properties=lambda device: _SIZES)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", "gfx942", 64)

    def get_current_device(self) -> int:
        return torch.cuda.current_device()

    def get_current_stream(self, device: int | None = None) -> int:
        return torch.cuda.current_stream(device).cuda_stream


def install() -> None:
    """Make the driver active and count the interpreter's launches."""
    triton.runtime.driver.set_active(Driver())
    run, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched: set[int] = set()  # modules, in the kernel that runs

    @torch.compiler.disable(reason="compiled code")
    def call(self: Any, *given: Any, **named: Any) -> Any:
        require_device(f"triton {self.fn.__name__}", given)

        def interpreted(*given: object, **named: object) -> None:
            patched.clear()
            _traffic()  # a kernel that failed left some
            try:
                run(self, *given, **named)
            except interpreter.InterpreterError as error:
                raise RuntimeError(f"triton {self.fn.__name__}: {error}") from error

        if self.fn.__name__ == "draw_kernel" and os.environ.get(DRAW) == "reference":
            return launch("triton draw_kernel", _draw, *given, touched=Touched(given[:6], given[6:7]))
        if self.fn.__name__ == "_small_copy_kernel":  # of SGLang 0.5.23: the interpreter takes seconds a verify step
            return launch("triton _small_copy_kernel", _copy, *given[:2], touched=Touched(*given[:2]))
        return launch(f"triton {self.fn.__name__}", interpreted, *given, touched=Touched((), found=_traffic), **named)

    def patch_once(function: FunctionType) -> object:
        """Patch Triton's language for a function, not again at each call from a kernel: that takes half of the time."""
        module = id(function.__globals__)
        if module in patched:
            return interpreter._LangPatchScope()
        patched.add(module)
        return patch(function)

    interpreter.GridExecutor.__call__, interpreter._patch_lang = call, patch_once
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)  # as for AMD
    builder = interpreter.InterpreterBuilder
    load, store, cas, rmw = (
        getattr(builder, f"create_{name}") for name in ("masked_load", "masked_store", "atomic_cas", "atomic_rmw")
    )

    def load_where(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        """Load with a mask of integers, too, which `tensor & scalar` makes in the interpreter."""
        mask = interpreter.TensorHandle(mask.data.astype(bool), interpreter.tl.int1)
        _note(_loads, pointers, mask.data)
        return load(self, pointers, mask, *rest)

    def store_where(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _note(_stores, pointers, mask.data.astype(bool))
        return store(self, pointers, value, mask, *rest)

    def compare_and_swap(self: Any, pointers: Any, *rest: Any) -> Any:
        _note(_stores, pointers, True)
        return cas(self, pointers, *rest)

    def read_and_write(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _note(_stores, pointers, mask.data.astype(bool))
        return rmw(self, operation, pointers, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = load_where, store_where
    builder.create_atomic_cas, builder.create_atomic_rmw = compare_and_swap, read_and_write


# What the kernel that runs loads and stores: from the lowest to the highest address of each access.
_Spans = set[tuple[int, int]]
_loads: _Spans = set()
_stores: _Spans = set()


def _note(spans: _Spans, pointers: Any, mask: Any) -> None:
    addresses = pointers.data[np.broadcast_to(mask, pointers.data.shape)]
    if addresses.size:
        size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        low, high = int(addresses.min()), int(addresses.max()) + size
        if not library.load().vg_holds(c_void_p(low), c_void_p(high)):
            raise RuntimeError(f"it touches {high - low} bytes that no tensor of the device holds as a whole")
        spans.add((low, high))


def _traffic() -> tuple[list[int], list[int]]:
    """Return what the kernel loaded and stored, and forget it."""
    found = tuple([address for span in spans for address in span] for spans in (_loads, _stores))
    _loads.clear()
    _stores.clear()
    return found[0], found[1]


def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def _draw(*given: torch.Tensor, **_: object) -> None:
    given[6].copy_(torch.from_numpy(draw_rows(*(tensor.numpy() for tensor in given[:6]))))

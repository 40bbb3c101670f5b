"""Triton on the virtual node: the driver says gfx942, and its interpreter runs each kernel as one launch."""

from __future__ import annotations

import os
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import interpreter

from kimi_w4a8_eagle3.sampling.draw import draw_rows

from .kernel_launch import launch
from .library import DRAW

_SIZES = {
    "max_shared_mem": 65536,
    "multiprocessor_count": 304,
    "warpSize": 64,
    "max_num_regs": 65536,
    "mem_clock_rate": 1,
    "mem_bus_width": 1,
    "sm_clock_rate": 1,
}


class Driver:
    binary_ext = "hsaco"
    utils = SimpleNamespace(get_device_properties=lambda device: _SIZES)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", "gfx942", 64)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_current_device(self) -> int:
        return torch.cuda.current_device()

    def set_current_device(self, device: int) -> None:
        torch.cuda.set_device(device)

    def get_current_stream(self, device: int | None = None) -> int:
        return torch.cuda.current_stream(device).cuda_stream

    def get_device_capability(self, *_: object) -> tuple[str, int]:
        return ("gfx942", 0)


def install() -> None:
    """Make the driver active and count the interpreter's launches."""
    triton.runtime.driver.set_active(Driver())
    run, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched: set[int] = set()  # modules, in the kernel that runs

    def call(self: Any, *given: Any, **named: Any) -> Any:
        def kernel(*given: torch.Tensor, **named: object) -> None:
            if self.fn.__name__ == "draw_kernel" and os.environ.get(DRAW) == "reference":
                given[6].copy_(torch.from_numpy(draw_rows(*(tensor.numpy() for tensor in given[:6]))))
            else:
                patched.clear()
                run(self, *given, **named)

        return launch(f"triton {self.fn.__name__}", kernel, *given, **named)

    def patch_once(function: FunctionType) -> object:
        """Patch Triton's language for a function, not again at each call from a kernel: that takes half of the time."""
        module = id(function.__globals__)
        if module in patched:
            return interpreter._LangPatchScope()
        patched.add(module)
        return patch(function)

    interpreter.GridExecutor.__call__, interpreter._patch_lang = call, patch_once
    load = interpreter.InterpreterBuilder.create_masked_load

    def load_where(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        """Load with a mask of integers, too, which `tensor & scalar` makes in the interpreter."""
        return load(self, pointers, interpreter.TensorHandle(mask.data.astype(bool), interpreter.tl.int1), *rest)

    interpreter.InterpreterBuilder.create_masked_load = load_where

"""A virtual node of eight gfx942 GPUs: SGLang's HIP path on a machine without a GPU.

In a process with KIMI_VIRTUAL_NODE=1, `torch.version.hip` is set, tensors say `cuda:N`, and a CPU does the arithmetic.
`device.cpp` is the device, `torch_cuda.py` the API of torch.cuda on it. `operators.py` has the compiled operators of
sgl_kernel and AITER, which refuse what `contracts.py` says. docs/virtual-node.md tells what this proves.
"""

from __future__ import annotations

import os
import sys

ENVIRONMENT = {
    "KIMI_VIRTUAL_NODE": "1",
    "SGLANG_USE_CPU_ENGINE": "0",
    "SGLANG_USE_AITER": "1",
    "TRITON_INTERPRET": "1",
    "TORCHDYNAMO_DISABLE": "0",
    "OMP_NUM_THREADS": "1",
    "KIMI_MOE_BACKEND": "reference",
}


def wanted() -> bool:
    """Return True in a process of the virtual node."""
    return os.environ.get("KIMI_VIRTUAL_NODE") == "1"


def installed() -> bool:
    return "kimi_w4a8_laptop.virtual.torch_cuda" in sys.modules


def install() -> bool:
    """Make this process one of the virtual node; runs before the first import of SGLang."""
    if not installed():
        from .. import torchvision_ops  # start-up: torch
        from ..cpu import batch_invariant  # start-up: torch
        from . import compiled, dynamo, kernel_launch, moe, rocm_tools, torch_cuda, triton_gpu  # start-up: torch

        torch_cuda.install()
        dynamo.install()
        kernel_launch.install()
        rocm_tools.install(torch_cuda.DEVICES)
        torchvision_ops.declare_missing()
        triton_gpu.install()
        compiled.install()
        moe.install()
        batch_invariant.register()
    return True


def register_hooks() -> None:
    """Hook what has no device here, and what is meant to be without a wait."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # SGLang's import order: after `install`

    from ..cpu import dp_controller  # start-up: SGLang
    from . import moe, rccl, unordered  # start-up: they load the device

    HookRegistry.register(rccl.TARGET, rccl.Gloo, HookType.REPLACE)
    HookRegistry.register(dp_controller.TARGET, dp_controller.event_loop, HookType.REPLACE)
    HookRegistry.register(moe.TARGET, moe.note_routed, HookType.BEFORE)
    unordered.register_hooks()

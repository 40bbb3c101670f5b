"""SGLang's CPU engine without compiled CPU kernels: pure-torch operators where `sgl_kernel` is absent.

`install()` runs before the first import of SGLang, in the server process and in every spawned child. If a compiled
`sgl_kernel` is installed, nothing is replaced. The operators are vectorised over the batch and exist for the demo and
the tests; they are not a fast CPU backend.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import sys
import types

_MARK = "__kimi_w4a8_laptop__"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def installed() -> bool:
    """Return True if the pure-torch operators replace `sgl_kernel` in this process."""
    return hasattr(sys.modules.get("sgl_kernel"), _MARK)


def install() -> bool:
    """Provide `sgl_kernel` and torchvision's operator declarations; True when our operators are in use."""
    if installed():
        return True
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    # torch's bookkeeping for gradients, which no engine computes, takes a tenth of a step.
    os.environ.setdefault("SGLANG_ENABLE_TORCH_INFERENCE_MODE", "1")
    from .. import torchvision_ops  # start-up: imports torch, which `installed` does not need

    torchvision_ops.declare_missing()
    if importlib.util.find_spec("sgl_kernel") is not None:
        return False
    from . import attention, draft_chain, locations  # start-up: torch

    module = types.ModuleType("sgl_kernel", "Pure-torch CPU operators of kimi-w4a8-laptop.")
    module.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", loader=None)
    setattr(module, _MARK, True)
    for part in (locations, draft_chain):
        for name in part.OPERATORS:
            setattr(module, name, getattr(part, name))
    attention.register()
    _keep_freed_memory()
    sys.modules["sgl_kernel"] = module
    return True


def _keep_freed_memory() -> None:
    """Tell glibc to keep what torch frees after each operator; getting the pages again takes a fifth of a prefill."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2**25)  # glibc's maximum
        mallopt(_M_TRIM_THRESHOLD, 2**30)


def claim_attention_backend() -> None:
    """Let SGLang resolve `--attention-backend intel_amx`, whose two operators are ours.

    Only argument resolution reads this flag. Layers read `cpu_has_amx_support` and stay on plain torch.
    """
    from sglang.srt.runtime_context import override_platform  # SGLang's import order: after `install`

    override_platform(has_amx=True).install()

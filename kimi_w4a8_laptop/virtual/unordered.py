"""Memory that SGLang means to be overwritten while it is read. Everything else that is not waited for is a race."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_void_p
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from . import library

# The method that makes the tensor, and the attribute that holds it.
TENSORS = {
    # The scheduler replaces slots of a running request by slots of the prefix cache with the same keys and values.
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.__init__": "req_to_token",
    # A warning reads a flag in pinned memory, and may read it a step later.
    "sglang.srt.utils.async_probe._AsyncNanWarner.check": "_host",
}


def register_hooks() -> None:
    for target, name in TENSORS.items():
        HookRegistry.register(target, _marked(name), HookType.AFTER)


def _marked(name: str) -> Callable[..., None]:
    def mark(_: object, owner: Any, *__: object, **___: object) -> None:
        if (tensor := getattr(owner, name)) is not None:
            library.load().vg_unordered(c_void_p(tensor.data_ptr()))

    return mark

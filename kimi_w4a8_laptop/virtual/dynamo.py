"""torch.compile on the virtual node: Dynamo traces as on a GPU, and its eager backend runs the graphs that it finds."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..cpu import batch_invariant
from . import library

_KERNELS = ("mm", "addmm", "bmm", "bmm_out", "sigmoid", "silu")  # Python that stands for kernels of torch


def install() -> None:
    """Let torch.compile take Dynamo's eager backend, and give Dynamo what it asks of a CUDA device."""
    for name in _KERNELS:
        setattr(batch_invariant, name, torch.compiler.disable(getattr(batch_invariant, name)))
    compile_with = torch.compile

    @functools.wraps(compile_with)
    def compiled(model: Any = None, *, fullgraph: bool = False, dynamic: bool | None = None, **_: object) -> Any:
        return compile_with(model, fullgraph=fullgraph, dynamic=dynamic, backend="eager")

    vars(torch)["compile"] = compiled
    vars(torch._C)["_cuda_getDevice"] = lambda: library.load().vg_device()
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)

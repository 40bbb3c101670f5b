"""AITER's custom all-reduce, which SGLang takes on HIP without --disable-custom-all-reduce: gloo adds the tensors.

Read in aiter/dist/device_communicators/custom_all_reduce.py of e4048607. Its all-gather and reduce-scatter have no
stand-in, so SGLang takes RCCL's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from .kernel_launch import Touched, launch
from .operators import STAND_INS

_MOST = 64 << 20  # bytes: a decode step's bound


class CustomAllreduce:
    disabled = False
    _IS_CAPTURING = False  # SGLang reads it

    def __init__(self, group: dist.ProcessGroup, device: torch.device, enable_register_for_capturing: bool) -> None:
        self._group = group

    @contextmanager
    def capture(self) -> Iterator[None]:
        self._IS_CAPTURING = True
        yield
        self._IS_CAPTURING = False

    def should_custom_ar(self, inp: torch.Tensor) -> bool:
        return inp.nbytes % 16 == 0 and 0 < inp.nbytes <= _MOST and inp.is_contiguous()

    @torch.compiler.disable(reason="compiled code")
    def custom_all_reduce(self, input: torch.Tensor) -> torch.Tensor | None:
        if not self.should_custom_ar(input):
            return None
        if self._IS_CAPTURING and not torch.cuda.is_current_stream_capturing():
            return torch.zeros_like(input)  # as in AITER: the warm-up of a capture only allocates
        out = torch.empty_like(input)
        launch("aiter custom_all_reduce", self._add, input, out, touched=Touched([input], [out]))
        return out

    def _add(self, source: torch.Tensor, target: torch.Tensor) -> None:
        dist.all_reduce(target.copy_(source), group=self._group)


STAND_INS["aiter.dist.device_communicators.custom_all_reduce.CustomAllreduce"] = CustomAllreduce

"""NCCL's library (RCCL on ROCm) for SGLang's PyNcclCommunicator: gloo moves the memory that its pointers name.

A call is one launch, so a graph records it and a replay communicates again. An operation that is not here fails.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from .kernel_launch import Touched, launch

TARGET = "sglang.srt.distributed.device_communicators.pynccl_wrapper.NCCLLibrary"
_TYPES = (
    torch.int8, torch.uint8, torch.int32, torch.uint32, torch.int64, torch.uint64, torch.float16, torch.float32,
    torch.float64, torch.bfloat16,
)  # fmt: skip
_Pointer = ctypes.c_void_p


class Gloo:
    """The methods of SGLang's NCCLLibrary that are called on the path of the recipes."""

    def __init__(self, so_file: str | None = None) -> None:
        self.ncclGetRawVersion, self.ncclGetVersion = (lambda: 22703), (lambda: "2.27.3")

    def ncclGetUniqueId(self) -> ctypes.Structure:
        from sglang.srt.distributed.device_communicators.pynccl_wrapper import ncclUniqueId  # SGLang's import order

        unique: ctypes.Structure = ncclUniqueId.from_buffer_copy(os.urandom(ctypes.sizeof(ncclUniqueId)))
        return unique

    def ncclCommInitRank(self, world_size: int, unique_id: ctypes.Structure, rank: int) -> object:
        store = dist.PrefixStore(bytes(unique_id).hex(), dist.distributed_c10d._get_default_store())
        return dist.ProcessGroupGloo(store, rank, world_size, dist.default_pg_timeout)

    def ncclAllReduce(
        self, source: _Pointer, target: _Pointer, count: int, kind: int, op: int, group: dist.ProcessGroup, _: object
    ) -> None:
        read, written = _memory(source, count, kind), _memory(target, count, kind)
        _transfer("ncclAllReduce", read, written, 0, lambda: group.allreduce([written.copy_(read)]).wait(), op)

    def ncclReduceScatter(
        self, source: _Pointer, target: _Pointer, count: int, kind: int, op: int, group: dist.ProcessGroup, _: object
    ) -> None:
        read, written = _memory(source, count * group.size(), kind), _memory(target, count, kind)
        out, parts = [written], [list(read.chunk(group.size()))]
        _transfer("ncclReduceScatter", read, written, group.rank(), lambda: group.reduce_scatter(out, parts).wait(), op)

    def ncclAllGather(
        self, source: _Pointer, target: _Pointer, count: int, kind: int, group: dist.ProcessGroup, _: object
    ) -> None:
        read, written = _memory(source, count, kind), _memory(target, count * group.size(), kind)
        parts = list(written.chunk(group.size()))
        _transfer("ncclAllGather", read, written, group.rank(), lambda: group.allgather([parts], [read]).wait())


@torch.compiler.disable(reason="compiled code")
def _transfer(
    name: str, read: torch.Tensor, written: torch.Tensor, place: int, work: Callable[[], object], op: int = 0
) -> None:
    """Communicate in one launch. place: of the smaller buffer in the larger one, in its own size, if it is in place."""
    if op:
        raise NotImplementedError(f"an NCCL reduction with operation {op} has no stand-in")
    small, large = sorted((read, written), key=len)
    start = small.data_ptr() - large.data_ptr()
    if -small.nbytes < start < large.nbytes and start != place * small.nbytes:
        raise RuntimeError(f"{name}: its buffers overlap, and not as NCCL's in-place operations do")
    touched = Touched(())
    touched.reads, touched.writes = ([part.data_ptr(), part.data_ptr() + part.nbytes] for part in (read, written))
    launch(name, work, touched=touched)


def _memory(pointer: _Pointer, count: int, kind: int) -> torch.Tensor:
    """Return a CPU tensor over the memory of a device pointer, which is the CPU's here. kind: a number of nccl.h."""
    size = count * _TYPES[kind].itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(pointer.value or 0), dtype=_TYPES[kind])

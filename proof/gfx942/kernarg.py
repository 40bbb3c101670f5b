"""The kernarg segment of a launch, from the argument layout in the kernel's metadata."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .errors import MachineError
from .global_memory import Buffer
from .parser import Kernel, KernelArg

Argument = Buffer | int | float | bytes


def kernarg_bytes(kernel: Kernel, args: Sequence[Argument] | bytes) -> npt.NDArray[np.uint8]:
    """The segment's bytes; `args` are the arguments in order, or their bytes."""
    if hidden := [arg.kind for arg in kernel.args if arg.kind.startswith("hidden")]:
        raise MachineError(f"the argument {hidden[0]} of {kernel.name} is not modelled")
    if isinstance(args, bytes):
        end = max((arg.offset + arg.size for arg in kernel.args), default=0)
        if not end <= len(args) <= -(-kernel.kernarg_bytes // 8) * 8:
            raise MachineError(
                f"{len(args)} bytes of arguments for {kernel.name}", expected=f"{end} to {kernel.kernarg_bytes}"
            )
        args = [args[arg.offset : arg.offset + arg.size] for arg in kernel.args]
    if len(args) != len(kernel.args):
        layout = ", ".join(f"{a.name or a.kind}@{a.offset}:{a.size}" for a in kernel.args)
        raise MachineError(f"{len(args)} arguments for {kernel.name}", expected=f"{len(kernel.args)}: {layout}")
    # Compilers may round a scalar load up over the segment's end: its allocation is a multiple of 64 bytes.
    segment = np.zeros(max(64, -(-kernel.kernarg_bytes // 64) * 64), np.uint8)
    for arg, value in zip(kernel.args, args, strict=True):
        raw = _encode(arg, value)
        if len(raw) != arg.size:
            found = f"argument {arg.name or arg.kind} at {arg.offset} got {len(raw)} bytes"
            raise MachineError(found, expected=str(arg.size))
        segment[arg.offset : arg.offset + arg.size] = np.frombuffer(raw, np.uint8)
    return segment


def _encode(arg: KernelArg, value: Argument) -> bytes:
    if isinstance(value, Buffer):
        return value.address.to_bytes(8, "little")
    if isinstance(value, bytes):
        return value
    if isinstance(value, float | np.floating):
        return struct.pack({2: "<e", 4: "<f", 8: "<d"}[arg.size], float(value))
    return (int(value) & ((1 << (8 * arg.size)) - 1)).to_bytes(arg.size, "little")

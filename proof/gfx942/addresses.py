"""Addresses of vector memory instructions, with the range check of buffer resources (CDNA3 ISA 9.1 and 10.3)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .context import ActiveLanes
from .errors import OutOfBounds, UnknownInstruction
from .operands import Operand, reader, scalar_reader
from .parser import Instruction
from .state import Array, Waves

# Gives the byte address of each active lane, and per word whether it is in range (None: all are).
Address = Callable[[Waves, ActiveLanes, int], tuple[Array, Array | None]]


def address_of(instruction: Instruction, space: str, operands: list[Operand], offset: int) -> Address:
    """The address function of an instruction; `operands` without the data."""
    if space == "buffer":
        return _buffer_address(instruction, operands, offset)
    vector, base = operands[0], operands[1] if len(operands) > 1 else None
    if base is None or base.kind == "off":
        read = reader(vector, "u64")
        return lambda w, lanes, size: (lanes.pick(read(w)) + np.uint64(offset & 0xFFFFFFFFFFFFFFFF), None)
    low, high = reader(vector, "u32"), reader(base, "u64")
    return lambda w, lanes, size: (
        lanes.pick(low(w).astype(np.uint64) + high(w)) + np.uint64(offset & 0xFFFFFFFFFFFFFFFF),
        None,
    )


def _buffer_address(instruction: Instruction, operands: list[Operand], offset: int) -> Address:
    vector, resource, scalar = operands
    if resource.kind != "scalar" or resource.count != 4:
        raise UnknownInstruction(f"{resource.text} is not a buffer resource")
    read_offset = reader(vector, "u32") if "offen" in instruction.modifiers else None
    read_scalar = scalar_reader(scalar, "u32")

    def address(w: Waves, lanes: ActiveLanes, size: int) -> tuple[Array, Array | None]:
        w.check_scalar(resource.register, 4)
        w0, w1, records, w3 = (_per_lane(w.s32[resource.register + n], lanes) for n in range(4))
        if (w1 >> 16).any() or ((w3 >> 23) & 1).any():
            raise UnknownInstruction("a structured, swizzled or thread-id buffer resource is not modelled")
        extra = _per_lane(np.broadcast_to(np.asarray(read_scalar(w)), w.count), lanes)
        at = np.full(lanes.count, offset, np.int64)
        if read_offset:
            at = at + lanes.pick(read_offset(w)).astype(np.int64)
        first = at + np.arange(max(1, size // 4))[:, None] * 4
        last = first + (min(size, 4) - 1)
        inside = last < records  # each word by itself
        _reject_ambiguous(first, last, records, extra)
        return (w0 + ((w1 & 0xFFFF) << 32) + extra + at).astype(np.uint64), None if inside.all() else inside

    return address


def _per_lane(value: Array, lanes: ActiveLanes) -> Array:
    """A scalar register [rows] for each active lane, [n]; [1] where all waves have the same."""
    wide = value.astype(np.int64)
    return wide[:1] if (wide == wide[0]).all() else wide[lanes.rows]


def _reject_ambiguous(first: Array, last: Array, records: Array, extra: Array) -> None:
    """Sources disagree whether the scalar offset takes part in the range check: no kernel may depend on it."""
    if extra.any() and ((last < records) & (last >= records - extra)).any():
        raise OutOfBounds("a buffer access is in range or not depending on how the scalar offset is checked")
    if (records & 3).any() and ((first < records) & (last >= records)).any():
        raise OutOfBounds("a buffer access straddles the end of the buffer inside one word")

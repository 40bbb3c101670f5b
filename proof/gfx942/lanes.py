"""Data movement between and within lanes: DPP and SDWA.

CDNA3 ISA 4.6 (SDWA and DPP): a row is 16 lanes, a bank 4 lanes of a row.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .errors import UnknownInstruction
from .operands import DTYPES, Operand, Reader, reader
from .parser import Instruction
from .state import LANES, Array, Waves

_LANE = np.arange(LANES)


def dpp_source(modifiers: dict[str, str]) -> Array:
    """For each lane the lane it reads, or -1 where the pattern has no source."""
    lane, row, place = _LANE, _LANE & ~15, _LANE & 15
    if "quad_perm" in modifiers:
        quad = np.array([int(n) for n in modifiers["quad_perm"].strip("[]").split(",")])
        return (lane & ~3) + quad[lane & 3]
    if "row_half_mirror" in modifiers:
        return (lane & ~7) + 7 - (lane & 7)
    if "row_shr" in modifiers:
        source = place - int(modifiers["row_shr"])
        return np.where(source >= 0, row + source, -1)
    if "row_ror" in modifiers:
        return row + (place - int(modifiers["row_ror"])) % 16
    if "row_bcast" in modifiers:
        step = {"15": 16, "31": 32}[modifiers["row_bcast"]]
        return np.where(lane >= step, (lane // step) * step - 1, -1)
    raise UnknownInstruction(f"DPP pattern {' '.join(modifiers)} is not modelled")


def apply_dpp(instruction: Instruction, source: Operand, kind: str) -> Callable[[Waves], tuple[Array, Array | None]]:
    """A function giving the permuted first source and the lanes that may be written."""
    if kind not in ("u32", "i32", "f32") or source.kind != "vector":
        raise UnknownInstruction(f"DPP on the {kind} source {source.text} is not modelled")
    modifiers = instruction.modifiers
    lanes = dpp_source(modifiers)
    rows, banks = int(modifiers.get("row_mask", "0xf"), 0), int(modifiers.get("bank_mask", "0xf"), 0)
    enabled = ((rows >> (_LANE // 16)) & 1 == 1) & ((banks >> (_LANE % 16 // 4)) & 1 == 1)
    zero_invalid = "bound_ctrl" in modifiers  # both spellings, :0 and :1, set the bit
    index, register = np.maximum(lanes, 0), source.register

    def permuted(w: Waves) -> tuple[Array, Array | None]:
        valid = (lanes >= 0) & w.exec[:, index]
        rows, wanted = np.nonzero(valid & enabled & w.exec)
        w.check_lanes(register, (rows, index[wanted]))
        value = getattr(w, kind)[register][:, index]
        value = np.abs(value) if source.absolute else value
        value = -value if source.negate else value
        mask = np.broadcast_to(enabled, valid.shape) if zero_invalid else valid & enabled
        return np.where(valid, value, value.dtype.type(0)), None if mask.all() else mask

    return permuted


_SELECT = {
    "BYTE_0": (0, 8),
    "BYTE_1": (8, 8),
    "BYTE_2": (16, 8),
    "BYTE_3": (24, 8),
    "WORD_0": (0, 16),
    "WORD_1": (16, 16),
}


def sdwa_reader(operand: Operand, kind: str, select: str) -> Reader:
    """A source read through an SDWA byte or word selector."""
    if select == "DWORD":
        return reader(operand, kind)
    first, bits = _SELECT[select]
    if kind == "f16" and bits == 16:
        return reader(operand, kind, high_half=first == 16)
    if kind not in ("u32", "u16"):
        raise UnknownInstruction(f"SDWA {select} of a {kind} source is not modelled")
    read, as_kind = reader(operand, "u32"), DTYPES[kind]
    shift, mask = np.uint32(first), np.uint32((1 << bits) - 1)
    return lambda w: ((read(w) >> shift) & mask).astype(as_kind)


def sdwa_writer(instruction: Instruction, target: Operand, kind: str) -> Callable[[Waves, Array, Array | None], None]:
    """A result written to a byte or word; the rest of the register becomes zero."""
    if instruction.modifiers.get("dst_unused", "UNUSED_PAD") != "UNUSED_PAD":
        raise UnknownInstruction("SDWA that keeps the rest of its destination is not modelled")
    shift, bits = _SELECT.get(instruction.modifiers.get("dst_sel", "DWORD"), (0, 32))
    mask = np.uint32((1 << bits) - 1)

    def write(w: Waves, value: Array, lanes: Array | None) -> None:
        word = np.asarray(value)
        word = word.view(np.uint16).astype(np.uint32) if word.dtype.itemsize == 2 else word.view(np.uint32)
        w.write_vector(target.register, w.u32, (word & mask) << np.uint32(shift), lanes)

    return write

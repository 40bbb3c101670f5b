"""Data movement between and within lanes: DPP, SDWA, lane reads and writes, ds_bpermute patterns.

CDNA3 ISA 4.6 (SDWA and DPP): a row is 16 lanes, a bank 4 lanes of a row.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

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
    if "row_mirror" in modifiers:
        return row + 15 - place
    if "row_half_mirror" in modifiers:
        return (lane & ~7) + 7 - (lane & 7)
    for name, sign in (("row_shl", 1), ("row_shr", -1)):
        if name in modifiers:
            source = place + sign * int(modifiers[name])
            return np.where((source >= 0) & (source < 16), row + source, -1)
    if "row_ror" in modifiers:
        return row + (place - int(modifiers["row_ror"])) % 16
    if "row_newbcast" in modifiers:
        return row + int(modifiers["row_newbcast"])
    if "row_bcast" in modifiers:
        step = {"15": 16, "31": 32}[modifiers["row_bcast"]]
        return np.where(lane >= step, (lane // step) * step - 1, -1)
    for name, sign, wrap in (("wave_shl", 1, 0), ("wave_rol", 1, 1), ("wave_shr", -1, 0), ("wave_ror", -1, 1)):
        if name in modifiers:
            source = lane + sign
            return source % LANES if wrap else np.where((source >= 0) & (source < LANES), source, -1)
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
        _check_source_lanes(w, register, index, valid & enabled)
        value = {"u32": w.u32, "i32": w.i32, "f32": w.f32}[kind][register][:, index]
        value = np.abs(value) if source.absolute else value
        value = -value if source.negate else value
        mask = np.broadcast_to(enabled, valid.shape) if zero_invalid else valid & enabled
        return np.where(valid, value, value.dtype.type(0)), None if mask.all() else mask

    return permuted


def _check_source_lanes(w: Waves, register: int, index: Array, wanted: Array) -> None:
    if w.vector_state[register] == 0:
        return
    if w.vector_state[register] == 2 or not (w.vector_written[register][:, index] | ~wanted)[w.exec].all():
        w.check_vector(register)


_SELECT = {
    "BYTE_0": (0, 8),
    "BYTE_1": (8, 8),
    "BYTE_2": (16, 8),
    "BYTE_3": (24, 8),
    "WORD_0": (0, 16),
    "WORD_1": (16, 16),
}


def sdwa_reader(operand: Operand, kind: str, select: str) -> Reader:
    """A source read through an SDWA byte or word selector, sign-extended if the operand says sext()."""
    if select == "DWORD":
        return reader(replace(operand, sign_extend=False), kind)
    first, bits = _SELECT[select]
    if kind == "f16" and bits == 16:
        return reader(operand, kind, high_half=first == 16)
    if kind not in ("u32", "i32", "u16", "i16"):
        raise UnknownInstruction(f"SDWA {select} of a {kind} source is not modelled")
    read = reader(replace(operand, sign_extend=False), "u32")
    up, down = np.uint32(32 - bits - first), np.uint32(32 - bits)
    as_kind, narrow = DTYPES[kind], kind.endswith("16")

    def selected(w: Waves) -> Array:
        word = np.asarray(read(w) << up)  # the field is now in the top bits
        field = (word.view(np.int32) >> down.astype(np.int32)).view(np.uint32) if operand.sign_extend else word >> down
        return field.astype(np.uint16).view(as_kind) if narrow else np.asarray(field).view(as_kind)

    return selected


def sdwa_writer(instruction: Instruction, target: Operand, kind: str) -> Callable[[Waves, Array, Array | None], None]:
    """A result written through an SDWA destination selector."""
    select = instruction.modifiers.get("dst_sel", "DWORD")
    unused = instruction.modifiers.get("dst_unused", "UNUSED_PAD")
    register = target.register
    shift, bits = _SELECT.get(select, (0, 32))
    mask = np.uint32((1 << bits) - 1)

    def write(w: Waves, value: Array, lanes: Array | None) -> None:
        bits32 = np.asarray(value)
        bits32 = bits32.view(np.uint16).astype(np.uint32) if bits32.dtype.itemsize == 2 else bits32.view(np.uint32)
        placed = (bits32 & mask) << np.uint32(shift)
        if select != "DWORD" and unused == "UNUSED_PRESERVE":
            w.check_vector(register)
            placed = placed | (w.u32[register] & ~(mask << np.uint32(shift)))
        w.write_vector(register, w.u32, placed, lanes)

    if select != "DWORD" and unused == "UNUSED_SEXT":
        raise UnknownInstruction("SDWA dst_unused:UNUSED_SEXT is not modelled")
    return write


def swizzle_source(offset: str) -> Array:
    """For each lane the lane that ds_swizzle_b32 reads (CDNA3 ISA, DS_SWIZZLE_B32)."""
    match = re.match(r"swizzle\((\w+)\s*,\s*(.*)\)$", offset)
    if not match:
        return _swizzle_number(int(offset, 0))
    name, values = match[1], [v.strip().strip('"') for v in match[2].split(",")]
    if name == "QUAD_PERM":
        return (_LANE & ~3) + np.array([int(v) for v in values])[_LANE & 3]
    if name == "BITMASK_PERM":
        codes = {"0": (0, 0, 0), "1": (0, 1, 0), "p": (1, 0, 0), "i": (1, 0, 1)}
        keep, set_, flip = (sum(codes[c][k] << (4 - n) for n, c in enumerate(values[0])) for k in range(3))
        return (_LANE & 32) | ((((_LANE & 31) & keep) | set_) ^ flip)
    if name in ("SWAP", "REVERSE"):
        flip = int(values[0]) if name == "SWAP" else int(values[0]) - 1
        return _LANE ^ flip
    if name == "BROADCAST":
        return (_LANE & ~(int(values[0]) - 1)) | int(values[1])
    raise UnknownInstruction(f"swizzle {offset} is not modelled")


def _swizzle_number(offset: int) -> Array:
    if offset & 0x8000:
        quad = np.array([(offset >> (2 * n)) & 3 for n in range(4)])
        return (_LANE & ~3) + quad[_LANE & 3]
    keep, set_, flip = offset & 31, (offset >> 5) & 31, (offset >> 10) & 31
    return (_LANE & 32) | ((((_LANE & 31) & keep) | set_) ^ flip)

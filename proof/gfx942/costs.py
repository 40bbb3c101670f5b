"""Cost of one wave64 instruction on a CDNA3 SIMD: clocks, class, bytes moved.

Full-rate VALU takes 4 clocks (16 lanes at a time), transcendentals and int/float conversions 16, an MFMA 4 clocks per
pass (LLVM's SISchedule model for gfx942; 16x16x32 i8 has 4 passes, which gives exactly the data sheet's peak). No
public document states the rate of 32-bit integer multiplies on CDNA3, so both are given: quarter rate (16 clocks, as
on earlier generations) and full rate (4, as LLVM has it).
"""

from __future__ import annotations

import re
from functools import cache

from .parser import Instruction

# Kinds of instructions, each with what its opcodes begin with; the first one fits.
_KINDS = {
    "mfma": r"v_mfma|v_smfmac",
    "accumulator move": r"v_accvgpr",
    "multiply": r"v_(mul_lo_[ui]32|mul_hi_[ui]32|mad_[ui]64_[ui]32)$",  # whose rate is not public
    "transcendental": r"v_(exp|log|rcp|rsq|sqrt|sin|cos)(_legacy|_iflag)?_f(16|32|64)$",
    "conversion": r"v_cvt_(f32_[iu](32|16)|[iu]32_f32|f32_ubyte\d|f16_f32|f32_f16|rpi|flr|off)",  # at quarter rate
    "simple": r"v_",
    "": r"s_(load|buffer_load|wait|barrier|nop)",
    "scalar": r"s_",
}
VALU = ("simple", "multiply", "transcendental", "conversion")  # kinds of the vector ALU
_MFMA = re.compile(r"^v_mfma_([if]\d+)_(\d+)x(\d+)x(\d+)_?(\w*)$")
_ELEMENT = {
    **{"ubyte": 1, "sbyte": 1, "byte": 1, "ushort": 2, "sshort": 2, "short": 2},
    **{"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16},
}


@cache
def kind(opcode: str) -> str:
    """Return the kind of an instruction, empty for those that do no work: waits, barriers and memory."""
    return next((name for name, pattern in _KINDS.items() if re.match(pattern, opcode)), "")


def valu_clocks(opcode: str, quarter_rate_multiply: bool) -> int:
    return 16 if kind(opcode) in ("transcendental", "conversion", *["multiply"] * quarter_rate_multiply) else 4


def mfma_clocks(opcode: str) -> int:
    """Clocks of one matrix instruction on the matrix core; 0 if unknown."""
    match = _MFMA.match(opcode)
    if not match:
        return 0
    accumulate, rows, depth, kind = match[1], int(match[2]), int(match[4]), match[5]
    if accumulate == "f64":
        return 16 if rows == 4 else 32
    if rows == 4:
        return 8
    fast_depth = {16: 16, 32: 8}[rows] // (2 if "xf32" in kind else 1)
    fast = depth >= fast_depth
    return {16: 16 if fast else 32, 32: 32 if fast else 64}[rows]


def load_bytes(opcode: str) -> int:
    """Bytes per lane that a load from memory into vector registers or LDS moves; 0 for anything else."""
    match = re.match(r"^(?:buffer|global|flat)_load_(?:lds_)?([a-z]+(?:x\d)?)(?:_d16)?(?:_hi)?$", opcode)
    return _ELEMENT.get(match[1], 0) if match else 0


def is_vector_load(instruction: Instruction) -> bool:
    return load_bytes(instruction.opcode) > 0


def loads_to_lds(instruction: Instruction) -> bool:
    """A load that bypasses the registers."""
    return "lds" in instruction.modifiers or "_load_lds_" in instruction.opcode


def address_group(instruction: Instruction) -> str:
    """Key of the buffer that a load reads: its resource or its scalar base."""
    bases = [o for o in instruction.operands if o.startswith("s[")]
    if instruction.opcode.startswith("buffer"):
        return bases[0] if bases else "?"
    return "global:" + (bases[-1] if bases else "vaddr")


def scalar_registers(operand: str) -> set[int]:
    """The numbered s registers that an operand names."""
    match = re.match(r"^s(?:(\d+)$|\[(\d+):(\d+)\])", operand)
    return set(range(int(match[1] or match[2]), int(match[1] or match[3]) + 1)) if match else set()


def vector_registers(operand: str) -> set[tuple[str, int]]:
    """The v and a registers that an operand names."""
    found: set[tuple[str, int]] = set()
    for file, one, first, last in re.findall(r"\b([va])(?:(\d+)\b|\[(\d+):(\d+)\])", operand):
        found |= {(file, n) for n in (range(int(first), int(last) + 1) if first else [int(one)])}
    return found

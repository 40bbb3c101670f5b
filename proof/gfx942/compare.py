"""Vector instructions that read or write lane masks: compares, selects, carries, division steps, lane access.

CDNA3 ISA chapter 12 (VOPC, VOP2 with carry, V_DIV_SCALE, V_DIV_FMAS, V_READLANE, V_MBCNT).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from .errors import UnknownInstruction
from .operands import Decoder, Operand, Reader, reader, writer
from .parser import Instruction
from .state import PARTIAL, Array, Step, Waves
from .valu import check_modifiers, copy_undefined, source_readers

_CONDITIONS: dict[str, Callable[[Array, Array], Array]] = {
    **{name: getattr(operator, name) for name in ("lt", "eq", "le", "gt", "ne", "ge")},
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nle": lambda a, b: ~(a <= b),
}
_COMPARE = re.compile(r"^v_cmp_(\w+)_(u16|[uif]32)$")


def _mask_register(operand: Operand) -> int:
    if operand.kind != "scalar" or operand.count != 2:
        raise UnknownInstruction(f"{operand.text} cannot hold a lane mask")
    return operand.register


def compare(instruction: Instruction, operands: list[Operand]) -> Step | None:
    match = _COMPARE.match(instruction.opcode)
    if not match:
        return None
    check_modifiers(instruction, {"src0_sel", "src1_sel"})
    if match[1] not in _CONDITIONS:
        raise UnknownInstruction(f"comparison {instruction.opcode} is not modelled")
    target, condition = _mask_register(operands[0]), _CONDITIONS[match[1]]
    a, b = source_readers(instruction, (match[2], match[2]), operands[1:])
    return lambda w: w.write_lane_mask(target, condition(a(w), b(w)))


def select(instruction: Instruction, operands: list[Operand]) -> Step:
    mask = _mask_register(operands[3])
    if instruction.encoding == "sdwa":
        no, yes = source_readers(instruction, ("u32", "u32"), operands[1:3])
    else:
        kind = "f32" if any(o.negate or o.absolute for o in operands[1:3]) else "u32"
        no, yes = (reader(o, kind) for o in operands[1:3])
    target = operands[0].register
    vectors = [o.register for o in operands[1:3] if o.kind == "vector"]

    def step(w: Waves) -> None:
        w.check_scalar(mask, 2)
        chosen = w.lane_mask(mask)
        if any(w.vector_state[index] == PARTIAL for index in vectors) and instruction.encoding != "sdwa":
            for operand, used in zip(operands[1:3], (~chosen, chosen), strict=True):
                if operand.kind == "vector":  # a select uses only the side that it picks
                    w.check_lanes(operand.register, used & w.exec)
            a, b = (_unchecked(w, o, read) for o, read in zip(operands[1:3], (no, yes), strict=True))
        else:
            a, b = no(w), yes(w)
        picked = np.where(chosen, b, a)
        w.write_vector(target, w.f32 if picked.dtype == np.float32 else w.u32, picked)

    return step


def _unchecked(w: Waves, operand: Operand, read: Reader) -> Array:
    return read(w) if operand.kind != "vector" or operand.negate or operand.absolute else w.u32[operand.register]


def carry(subtract: bool, reverse: bool, carry_in: bool) -> Decoder:
    def decode(_: Instruction, operands: list[Operand]) -> Step:
        target, carry_out = operands[0], _mask_register(operands[1])
        first, second = (reader(o, "u32") for o in operands[2:4])
        carry_register = _mask_register(operands[4]) if carry_in else 0
        write = writer(target, "u32")

        def step(w: Waves) -> None:
            a, b = (x.astype(np.int64) for x in (first(w), second(w)))
            a, b = (b, a) if reverse else (a, b)
            given: Array = np.zeros(1, np.int64)
            if carry_in:
                w.check_scalar(carry_register, 2)
                given = w.lane_mask(carry_register).astype(np.int64)
            total = a - b - given if subtract else a + b + given
            write(w, (total & 0xFFFFFFFF).astype(np.uint32), None)
            w.write_lane_mask(carry_out, (total < 0) | (total > 0xFFFFFFFF))

        return step

    return decode


def mad_64(_: Instruction, operands: list[Operand]) -> Step:
    """Compilers also add 32-bit numbers with it: then the high halves of the addend and of the result are undefined."""
    carry_out, target, addend = _mask_register(operands[1]), operands[0], operands[4]
    a, b, c = reader(operands[2], "u32"), reader(operands[3], "u32"), reader(addend, "u64")
    low, write = reader(replace(addend, count=1), "u32"), writer(target, "u64")

    def step(w: Waves) -> None:
        high = addend.register + 1
        if addend.kind == "vector" and w.vector_state[high] == PARTIAL:
            written = w.vector_written[high].copy()
            added = low(w).astype(np.uint64) | w.u32[high].astype(np.uint64) << np.uint64(32)
        else:
            written, added = None, c(w)
        total = a(w).astype(np.uint64) * b(w).astype(np.uint64) + added
        write(w, total, None)
        if written is not None and not written[w.exec].all():
            copy_undefined(w, target.register + 1, w.u32[target.register + 1], written)
        w.write_lane_mask(carry_out, np.asarray(total < added))

    return step

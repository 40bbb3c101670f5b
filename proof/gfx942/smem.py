"""Scalar memory: s_load (CDNA3 ISA chapter 7)."""

from __future__ import annotations

import re

import numpy as np

from .context import Context
from .errors import UnknownInstruction
from .operands import Operand, scalar_reader
from .parser import Instruction
from .state import Array, Step, Waves
from .valu import check_modifiers
from .waits import Outstanding


def decode_smem(instruction: Instruction, operands: list[Operand], context: Context) -> Step | None:
    match = re.match(r"^s_load_dword(?:x(\d+))?$", instruction.opcode)
    if not match:
        return None
    check_modifiers(instruction, {"glc", "offset"})
    count = int(match[1] or 1)
    target, base = operands[0], operands[1]
    if target.count != count:
        raise UnknownInstruction(f"{target.text} does not fit {instruction.opcode}")
    scalar = scalar_reader(operands[2], "u32") if len(operands) > 2 else None
    extra = int(instruction.modifiers.get("offset", "0"), 0)
    signed = len(operands) > 2 and operands[2].kind == "constant"

    def offset(w: Waves) -> Array:
        value: Array = np.full(w.count, extra, np.int64)
        if scalar is not None:
            read = np.asarray(scalar(w))
            value = value + (read.view(np.int32) if signed else read).astype(np.int64)
        return value & ~np.int64(3)

    def step(w: Waves) -> None:
        group = context.group_ids[w.rows.group]
        w.check_scalar(base.register, 2)
        start = w.s32[base.register].astype(np.int64) | (w.s32[base.register + 1].astype(np.int64) << np.int64(32))
        words = context.memory.load((start + offset(w)).astype(np.uint64), 4 * count, group)
        w.write_scalar_words(target.register, list(words))
        w.scalar_load_issued(target.register, count)
        w.queues.lgkm.append(Outstanding("smem", scalar=range(target.register, target.register + count)))

    return step

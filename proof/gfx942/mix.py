"""Mixed precision FMA: V_FMA_MIX_F32 (CDNA3 ISA 12.14).

For each source op_sel_hi says whether it is a float32 (0) or a half (1), and op_sel which half.
"""

from __future__ import annotations

import numpy as np

from .errors import UnknownInstruction
from .numeric import fma_f32
from .operands import Operand, Reader, reader
from .parser import Instruction
from .state import Step


def fma_mix(instruction: Instruction, operands: list[Operand]) -> Step:
    target, *sources = operands
    halves, highs = (instruction.bits(name, len(sources)) for name in ("op_sel_hi", "op_sel"))
    a, b, c = (_source(o, h, s) for o, h, s in zip(sources, halves, highs, strict=True))
    register = target.register
    return lambda w: w.write_vector(register, w.f32, fma_f32(a(w), b(w), c(w)))


def _source(operand: Operand, half: bool, high: bool) -> Reader:
    if not half:
        if high:
            raise UnknownInstruction("op_sel without op_sel_hi on a mixed precision source is not modelled")
        return reader(operand, "f32")
    read = reader(operand, "f16", high_half=high)
    return lambda w: read(w).astype(np.float32)

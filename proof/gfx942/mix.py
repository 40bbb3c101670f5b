"""Mixed precision FMA: V_FMA_MIX_F32, V_FMA_MIXLO_F16, V_FMA_MIXHI_F16 (CDNA3 ISA 12.14).

For each source op_sel_hi says whether it is a float32 (0) or a half (1), and op_sel which half. MIXLO and MIXHI round
the float32 result to a half and leave the other half of the destination as it is.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .errors import UnknownInstruction
from .numeric import fma_f32
from .operands import Operand, Reader, parse_operand, reader
from .parser import Instruction, Kernel
from .state import PENDING, Waves
from .valu import check_modifiers

Step = Callable[[Waves], object]


def decode_mix(instruction: Instruction, kernel: Kernel) -> Step | None:
    """The closure of a mixed precision FMA, or None."""
    if instruction.opcode not in ("v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16"):
        return None
    check_modifiers(instruction, {"op_sel", "op_sel_hi"})
    target, *sources = (parse_operand(text, kernel) for text in instruction.operands)
    halves, highs = (_bits(instruction, name, len(sources)) for name in ("op_sel_hi", "op_sel"))
    a, b, c = (_source(o, h, s) for o, h, s in zip(sources, halves, highs, strict=True))
    register = target.register
    if instruction.opcode == "v_fma_mix_f32":
        return lambda w: w.write_vector(register, w.f32, fma_f32(a(w), b(w), c(w)))
    high = "mixhi" in instruction.opcode
    keep, shift = np.uint32(0x0000FFFF if high else 0xFFFF0000), np.uint32(16 if high else 0)

    def step(w: Waves) -> None:
        half = np.asarray(fma_f32(a(w), b(w), c(w)).astype(np.float16)).view(np.uint16).astype(np.uint32)
        if w.vector_state[register] == PENDING:
            w.check_vector(register)
        w.write_vector(register, w.u32, (w.u32[register] & keep) | (half << shift))

    return step


def _bits(instruction: Instruction, name: str, count: int) -> list[bool]:
    text = instruction.modifiers.get(name)
    return [bit == "1" for bit in text.strip("[]").split(",")][:count] if text else [False] * count


def _source(operand: Operand, half: bool, high: bool) -> Reader:
    if not half:
        if high:
            raise UnknownInstruction("op_sel without op_sel_hi on a mixed precision source is not modelled")
        return reader(operand, "f32")
    read = reader(operand, "f16", high_half=high)
    return lambda w: read(w).astype(np.float32)

"""The two steps of a float32 division that use lane masks: V_DIV_SCALE and V_DIV_FMAS (CDNA3 ISA chapter 12, VOP3)."""

from __future__ import annotations

import numpy as np

from .errors import UnknownInstruction
from .numeric import exponent_f32, fma_to_odd, is_denormal
from .operands import Operand, reader, writer
from .parser import Instruction
from .state import VCC, Step, Waves


def div_scale(_: Instruction, operands: list[Operand]) -> Step:
    if operands[1].kind != "scalar" or operands[1].count != 2:
        raise UnknownInstruction(f"{operands[1].text} cannot hold a lane mask")
    scaled_mask = operands[1].register
    first, denominator, numerator = (reader(o, "f32") for o in operands[2:5])
    write = writer(operands[0], "f32")

    def step(w: Waves) -> None:
        s, d, n = np.broadcast_arrays(first(w), denominator(w), numerator(w))
        is_d, is_n = s.view(np.uint32) == d.view(np.uint32), s.view(np.uint32) == n.view(np.uint32)
        up, down = np.ldexp(s, 64), np.ldexp(s, -64)
        tiny_inverse = is_denormal((1 / d.astype(np.float64)).astype(np.float32))
        tiny_ratio = is_denormal((n.astype(np.float64) / d.astype(np.float64)).astype(np.float32))
        conditions = [
            (n == 0) | (d == 0),
            exponent_f32(n) - exponent_f32(d) >= 96,
            is_denormal(d),
            tiny_inverse & tiny_ratio,
            tiny_inverse,
            tiny_ratio,
            exponent_f32(n) <= 23,
        ]
        only_d, only_n = np.where(is_d, up, s), np.where(is_n, up, s)
        results = [np.full_like(s, np.nan), only_d, up, only_d, down, only_n, up]
        write(w, np.select(conditions, results, s), None)
        flags = [c * 0 + (k in (1, 3, 5)) > 0 for k, c in enumerate(conditions)]
        w.write_lane_mask(scaled_mask, np.select(conditions, flags, False))

    return step


def div_fmas(_: Instruction, operands: list[Operand]) -> Step:
    """Undo V_DIV_SCALE where it scaled: times 2**64 or 2**-64, by the size of the quotient estimate."""
    a, b, c = (reader(o, "f32") for o in operands[1:4])
    write = writer(operands[0], "f32")

    def step(w: Waves) -> None:
        w.check_scalar(VCC, 2)
        estimate = c(w)
        total = fma_to_odd(a(w), b(w), estimate)
        factor = np.where(exponent_f32(estimate) > 127, 2.0**64, 2.0**-64)
        write(w, np.where(w.lane_mask(VCC), total * factor, total).astype(np.float32), None)

    return step

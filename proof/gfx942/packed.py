"""Packed math (VOP3P): two 16-bit halves of a register, or two float32 in a register pair.

CDNA3 ISA 12.14: op_sel picks the source half for the low result, op_sel_hi for the high result; neg_lo and neg_hi
negate them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .errors import UnknownInstruction
from .numeric import fma_f32
from .operands import DTYPES, Operand, Reader, constant_bits, reader
from .parser import Instruction
from .state import Array, Step, Waves

PACKED: dict[str, Callable[..., Array]] = {
    "v_pk_add_f32": lambda a, b: a + b,
    "v_pk_mul_f32": lambda a, b: a * b,
    "v_pk_fma_f32": fma_f32,
    "v_pk_add_u16": lambda a, b: a + b,
}


def packed(instruction: Instruction, operands: list[Operand]) -> Step:
    opcode, sources = instruction.opcode, operands[1:]
    low = instruction.bits("op_sel", len(sources)), instruction.bits("neg_lo", len(sources))
    high = instruction.bits("op_sel_hi", len(sources), True), instruction.bits("neg_hi", len(sources))
    if opcode.endswith("f32"):
        return _packed_f32(operands, PACKED[opcode], low, high)
    return _packed_halves(operands, PACKED[opcode], low[0], high[0])


Flags = tuple[list[bool], list[bool]]


def _word(operand: Operand, high: bool, kind: str) -> Reader:
    if operand.kind == "constant":
        if high:
            raise UnknownInstruction("the high half of a constant in packed f32 is not modelled")
        value = np.uint32(constant_bits(operand.number, "f32")).view(DTYPES[kind])
        return lambda w: value
    half = Operand(operand.kind, operand.text, operand.register + int(high))
    return reader(half, kind)


def _packed_f32(operands: list[Operand], function: Callable[..., Array], low: Flags, high: Flags) -> Step:
    target, sources = operands[0].register, operands[1:]
    readers = []
    for select, negate in (low, high):
        reads = [_word(o, s, "f32") for o, s in zip(sources, select, strict=True)]
        readers.append([(lambda w, r=r: -r(w)) if n else r for r, n in zip(reads, negate, strict=True)])

    def step(w: Waves) -> None:
        first = function(*(read(w) for read in readers[0]))
        second = function(*(read(w) for read in readers[1]))
        w.write_vector(target, w.f32, first)
        w.write_vector(target + 1, w.f32, second)

    return step


def _packed_halves(operands: list[Operand], function: Callable[..., Array], low: list[bool], high: list[bool]) -> Step:
    target, sources = operands[0].register, operands[1:]
    readers = [[reader(o, "u16", high_half=s) for o, s in zip(sources, half, strict=True)] for half in (low, high)]

    def step(w: Waves) -> None:
        first, second = (function(*(read(w) for read in half)).astype(np.uint32) for half in readers)
        w.write_vector(target, w.u32, first | (second << np.uint32(16)))

    return step

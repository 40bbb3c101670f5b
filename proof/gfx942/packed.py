"""Packed math (VOP3P): two 16-bit halves of a register, or two float32 in a register pair.

CDNA3 ISA 12.14: op_sel picks the source half for the low result, op_sel_hi for the high result; neg_lo and neg_hi
negate them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .errors import UnknownInstruction
from .numeric import fma_f32, maximum, minimum
from .operands import DTYPES, Operand, Reader, constant_bits, parse_operand, reader
from .parser import Instruction, Kernel
from .state import Array, Waves
from .valu import check_modifiers

Step = Callable[[Waves], object]


def _fma_f16(a: Array, b: Array, c: Array) -> Array:
    wide = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
    return wide.astype(np.float16)  # 22 + 11 bits fit into float64 but for far apart exponents


_F32: dict[str, Callable[..., Array]] = {
    "v_pk_add_f32": lambda a, b: a + b,
    "v_pk_mul_f32": lambda a, b: a * b,
    "v_pk_fma_f32": fma_f32,
    "v_pk_mov_b32": lambda a, b: np.where(True, a, b),
}
_HALVES: dict[str, tuple[str, Callable[..., Array]]] = {
    "v_pk_add_u16": ("u16", lambda a, b: a + b),
    "v_pk_sub_u16": ("u16", lambda a, b: a - b),
    "v_pk_add_i16": ("u16", lambda a, b: a + b),
    "v_pk_sub_i16": ("u16", lambda a, b: a - b),
    "v_pk_mul_lo_u16": ("u16", lambda a, b: a * b),
    "v_pk_mad_u16": ("u16", lambda a, b, c: a * b + c),
    "v_pk_lshlrev_b16": ("u16", lambda a, b: b << (a & np.uint16(15))),
    "v_pk_lshrrev_b16": ("u16", lambda a, b: b >> (a & np.uint16(15))),
    "v_pk_ashrrev_i16": ("i16", lambda a, b: b >> (a & np.int16(15))),
    "v_pk_max_i16": ("i16", np.maximum),
    "v_pk_min_i16": ("i16", np.minimum),
    "v_pk_max_u16": ("u16", np.maximum),
    "v_pk_min_u16": ("u16", np.minimum),
    "v_pk_add_f16": ("f16", lambda a, b: a + b),
    "v_pk_mul_f16": ("f16", lambda a, b: a * b),
    "v_pk_max_f16": ("f16", maximum),
    "v_pk_min_f16": ("f16", minimum),
    "v_pk_fma_f16": ("f16", _fma_f16),
}


def decode_packed(instruction: Instruction, kernel: Kernel) -> Step | None:
    """The closure of a packed instruction, or None."""
    opcode = instruction.opcode
    if opcode not in _F32 and opcode not in _HALVES:
        return None
    check_modifiers(instruction, {"op_sel", "op_sel_hi", "neg_lo", "neg_hi"})
    operands = [parse_operand(text, kernel) for text in instruction.operands]
    sources = operands[1:]
    low = _flags(instruction, "op_sel", len(sources), False), _flags(instruction, "neg_lo", len(sources), False)
    high = _flags(instruction, "op_sel_hi", len(sources), True), _flags(instruction, "neg_hi", len(sources), False)
    if opcode == "v_pk_mov_b32":
        return _packed_move(operands, low[0])
    if opcode in _F32:
        return _packed_f32(operands, _F32[opcode], low, high)
    return _packed_halves(operands, *_HALVES[opcode], low, high)


Flags = tuple[list[bool], list[bool]]


def _flags(instruction: Instruction, name: str, count: int, default: bool) -> list[bool]:
    text = instruction.modifiers.get(name)
    return [bit == "1" for bit in text.strip("[]").split(",")] if text else [default] * count


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


def _packed_move(operands: list[Operand], select: list[bool]) -> Step:
    """V_PK_MOV_B32: op_sel[0] picks a word of source 0 for the low result, op_sel[1] of source 1 for the high."""
    target = operands[0].register
    first, second = (_word(o, s, "u32") for o, s in zip(operands[1:], select, strict=True))

    def step(w: Waves) -> None:
        a, b = np.copy(first(w)), np.copy(second(w))
        w.write_vector(target, w.u32, a)
        w.write_vector(target + 1, w.u32, b)

    return step


def _packed_halves(operands: list[Operand], kind: str, function: Callable[..., Array], low: Flags, high: Flags) -> Step:
    target, sources = operands[0].register, operands[1:]

    def read_half(operand: Operand, select: bool, negate: bool) -> Reader:
        if operand.kind == "constant":
            read = reader(operand, kind)
        else:
            read = reader(operand, kind, high_half=select)
        return (lambda w: -read(w)) if negate else read

    readers = [[read_half(o, s, n) for o, s, n in zip(sources, *half, strict=True)] for half in (low, high)]

    def step(w: Waves) -> None:
        words = [np.asarray(function(*(read(w) for read in half))) for half in readers]
        first, second = (word.view(np.uint16).astype(np.uint32) for word in words)
        w.write_vector(target, w.u32, first | (second << np.uint32(16)))

    return step

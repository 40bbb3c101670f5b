"""Matrix instructions: D = A x B + C over a whole wave, EXEC ignored.

Layout (CDNA3 ISA, chapter 7 "Matrix arithmetic instructions" and AMD's public matrix instruction calculator), for
M x N x K with M = N and `g` = lane // M: a lane holds row (A) or column (B) `lane % M` and the k values
g*P .. g*P + P-1, P = K*M/64, lowest k in the lowest bits. C and D: register r of lane l is row
(r // 4) * (256 / M) + 4 * (l // M) + r % 4 and column l % M.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .errors import UnknownInstruction
from .numeric import bf16_to_f32
from .operands import Operand, constant_bits
from .parser import Instruction
from .state import Array, Step, Waves
from .valu import check_modifiers

_NAME = re.compile(r"^v_mfma_([if]32)_(16|32)x(?:16|32)x(\d+)_(i8|bf16)$")
_SHAPES = {"i8": {(16, 32), (32, 16)}, "bf16": {(16, 16)}}
_ELEMENT_BYTES = {"i8": 1, "bf16": 2}


def mfma(instruction: Instruction, operands: list[Operand]) -> Step | None:
    match = _NAME.match(instruction.opcode)
    if not match or (int(match[2]), int(match[3])) not in _SHAPES[match[4]]:
        return None
    check_modifiers(instruction, set())
    d, a, b, c = operands
    size, depth = int(match[2]), int(match[3])
    left, right = _matrix(a, size, depth, match[4]), _matrix(b, size, depth, match[4])
    integer = match[1] == "i32"
    add, registers = _accumulator(c, size, integer), size * size // 64
    if d.kind != "vector" or d.count != registers:
        raise UnknownInstruction(f"{d.text} does not fit {instruction.opcode}")

    def step(w: Waves) -> None:
        product = np.matmul(left(w), right(w).transpose(0, 2, 1))  # [rows, M, N]
        tile = _to_registers(product, size)
        w.before_vector_write(d.register, d.count)
        if integer:  # |A x B| <= 127 * 128 * 32 < 2**24: the float32 product is exact
            w.vector.view(np.int32)[d.register : d.register + registers] = tile.astype(np.int32) + add(w)
        else:
            w.vector.view(np.float32)[d.register : d.register + registers] = tile + add(w)
        w.vector_state[d.register : d.register + registers] = bytes(registers)

    return step


def _matrix(operand: Operand, size: int, depth: int, form: str) -> Callable[[Waves], Array]:
    """A reader of an A or B operand as [rows, size, depth] in float32 (exact) or float64."""
    groups, per_lane = 64 // size, depth * size // 64
    registers = per_lane * _ELEMENT_BYTES[form] // 4
    if operand.kind != "vector" or operand.count != registers:
        raise UnknownInstruction(f"{operand.text} does not fit a {size}x{depth} {form} matrix")
    first, last = operand.register, operand.register + registers
    convert = _CONVERT[form]

    def read(w: Waves) -> Array:
        if any(w.vector_state[first:last]):
            w.check_vector(first, registers, all_lanes=True)
        words = w.vector[first:last].reshape(registers, w.count, groups, size).transpose(1, 3, 2, 0)
        return convert(np.ascontiguousarray(words)).reshape(w.count, size, depth)

    return read


_CONVERT: dict[str, Callable[[Array], Array]] = {
    "i8": lambda words: words.view(np.int8).astype(np.float32),
    "bf16": lambda words: bf16_to_f32(words.view(np.uint16)).astype(np.float64),
}


def _to_registers(product: Array, size: int) -> Array:
    """[rows, M, N] to [registers, rows, 64]."""
    groups = 64 // size
    blocks = size // (4 * groups)
    split = product.reshape(-1, blocks, groups, 4, size)  # row = block * 4 * groups + group * 4 + r
    return split.transpose(1, 3, 0, 2, 4).reshape(blocks * 4, -1, 64)


def _accumulator(operand: Operand, size: int, integer: bool) -> Callable[[Waves], Array]:
    registers = size * size // 64
    dtype: type[np.generic] = np.int32 if integer else np.float32
    if operand.kind == "constant":
        bits = constant_bits(operand.number, "i32" if integer else "f32")
        value = np.array(bits, np.uint32).view(dtype)[()]
        return lambda w: value
    if operand.kind != "vector" or operand.count != registers:
        raise UnknownInstruction(f"{operand.text} cannot be the accumulator of a {size}x{size} result")

    def read(w: Waves) -> Array:
        first = operand.register
        if any(w.vector_state[first : first + registers]):
            w.check_vector(first, registers, all_lanes=True)
        return w.vector[first : first + registers].view(dtype)

    return read

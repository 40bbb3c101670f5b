"""Instruction operands: registers, inline constants and literals, and readers that fetch them as typed arrays."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter

import numpy as np

from .errors import UnknownInstruction
from .parser import Instruction, Kernel
from .state import EXEC, M0, NUM_SGPRS, VCC, Array, Step, Waves, require_register

Reader = Callable[[Waves], Array]

_REGISTER = re.compile(r"^([vsa])(?:(\d+)|\[(\d+):(\d+)\])$")
_NAMED = {
    "vcc": (VCC, 2),
    "vcc_lo": (VCC, 1),
    "vcc_hi": (VCC + 1, 1),
    "exec": (EXEC, 2),
    "exec_lo": (EXEC, 1),
    "exec_hi": (EXEC + 1, 1),
    "m0": (M0, 1),
}


@dataclass(frozen=True)
class Operand:
    """`kind` is vector, scalar, constant or off. Accumulation registers are vector registers after the v ones."""

    kind: str
    text: str
    register: int = 0
    count: int = 1
    number: int | float = 0
    negate: bool = False
    absolute: bool = False


Decoder = Callable[[Instruction, list[Operand]], Step]


def parse_operand(text: str, kernel: Kernel) -> Operand:
    """Parse one operand; a register that the kernel did not allocate is an error."""
    return _parse(text, kernel.vgprs, kernel.agprs)


@lru_cache(maxsize=4096)
def _parse(text: str, vgprs: int, agprs: int) -> Operand:
    if text.startswith("-") and text[1:2] in ("v", "s", "|", "a"):
        return replace(_parse(text[1:], vgprs, agprs), negate=True)
    for prefix, change in (("|", "absolute"), ("abs(", "absolute"), ("neg(", "negate")):
        if text.startswith(prefix):
            return replace(_parse(text[len(prefix) : -1], vgprs, agprs), **{change: True})  # type: ignore[arg-type]
    match = _REGISTER.match(text)
    if match:
        first = int(match[2] or match[3])
        count = int(match[4]) - first + 1 if match[4] else 1
        return _register(match[1], first, count, text, vgprs, agprs)
    if text in _NAMED:
        return Operand("scalar", text, *_NAMED[text])
    if text == "off":
        return Operand("off", text)
    if re.match(r"^-?(0x[0-9a-fA-F]+|\d+)$", text):
        return Operand("constant", text, number=int(text, 0))
    if re.match(r"^-?\d+\.\d+(e[-+]?\d+)?$", text):
        return Operand("constant", text, number=float(text))
    raise UnknownInstruction(f"operand {text!r} is not modelled")


def _register(letter: str, first: int, count: int, text: str, vgprs: int, agprs: int) -> Operand:
    if letter == "s":
        require_register(first, count, 102, "s")
        return Operand("scalar", text, first, count)
    require_register(first, count, vgprs if letter == "v" else agprs, letter)
    return Operand("vector", text, first if letter == "v" else vgprs + first, count)


def constant_bits(number: int | float, kind: str) -> int:
    """The bits that an inline constant or literal has as an operand of type `kind` (CDNA3 ISA, table of SSRC)."""
    if isinstance(number, float):
        return int.from_bytes(struct.pack("<e" if kind == "f16" else "<f", number), "little")
    return number & (0xFFFFFFFFFFFFFFFF if kind.endswith("64") else 0xFFFF if kind.endswith("16") else 0xFFFFFFFF)


DTYPES: dict[str, type[np.generic]] = {
    "u16": np.uint16,
    "f16": np.float16,
    "u32": np.uint32,
    "i32": np.int32,
    "f32": np.float32,
    "u64": np.uint64,
}
_BITS: dict[int, type[np.unsignedinteger]] = {16: np.uint16, 32: np.uint32, 64: np.uint64}


def width(kind: str) -> int:
    return int(kind[1:])


def reader(operand: Operand, kind: str, high_half: bool = False) -> Reader:
    """A function that reads `operand` as `kind`; its result broadcasts to [rows, 64].

    `high_half` picks bits 31:16 for a 16-bit type (op_sel).
    """
    read = _raw_reader(operand, kind, high_half)
    if not (operand.negate or operand.absolute):
        return read
    if kind[0] != "f":
        raise UnknownInstruction(f"a floating-point modifier on the integer operand {operand.text}")

    def read_signed(w: Waves) -> Array:
        value = np.abs(read(w)) if operand.absolute else read(w)
        return -value if operand.negate else value

    return read_signed


def _raw_reader(operand: Operand, kind: str, high_half: bool) -> Reader:
    if operand.kind == "constant":
        bits = constant_bits(operand.number, kind)
        value = np.array(bits, _BITS[width(kind)]).view(DTYPES[kind])[()]
        return lambda w: value
    if operand.kind not in ("vector", "scalar"):
        raise UnknownInstruction(f"operand {operand.text!r} cannot be read as a value")
    if width(kind) == 64:
        if operand.count != 2:
            raise UnknownInstruction(f"operand {operand.text!r} is not a pair")
        return _pair_reader(operand, DTYPES[kind])
    if operand.count != 1:
        raise UnknownInstruction(f"operand {operand.text!r} is not one register")
    if width(kind) == 16:
        return _half_reader(reader(replace(operand, negate=False, absolute=False), "u32"), DTYPES[kind], high_half)
    return _word_reader(operand, kind)


def _word_reader(operand: Operand, kind: str) -> Reader:
    index = operand.register
    if operand.kind == "scalar":
        dtype = DTYPES[kind]

        def read_scalar(w: Waves) -> Array:
            if w.scalar_state[index]:
                w.check_scalar(index)
            return w.s32[index].view(dtype)[:, None]

        return read_scalar

    view = attrgetter(kind)

    def read_vector(w: Waves) -> Array:
        if w.vector_state[index]:
            w.check_vector(index)
        found: Array = view(w)[index]
        return found

    return read_vector


def _half_reader(read: Reader, dtype: type[np.generic], high_half: bool) -> Reader:
    shift = np.uint32(16 if high_half else 0)
    return lambda w: (read(w) >> shift).astype(np.uint16).view(dtype)


def _pair_reader(operand: Operand, dtype: type[np.generic]) -> Reader:
    low = _word_reader(replace(operand, count=1), "u32")
    high = _word_reader(replace(operand, register=operand.register + 1, count=1), "u32")
    return lambda w: (low(w).astype(np.uint64) | (high(w).astype(np.uint64) << np.uint64(32))).view(dtype)


def scalar_reader(operand: Operand, kind: str) -> Reader:
    """Like `reader` for scalar instructions: the result has shape [rows] (or is a constant)."""
    if operand.kind == "vector":
        raise UnknownInstruction(f"vector register {operand.text} in a scalar instruction")
    if operand.kind == "constant":
        return _raw_reader(operand, kind, False)
    read = _raw_reader(operand, kind, False)
    return lambda w: read(w)[:, 0]


def writer(operand: Operand, kind: str) -> Callable[[Waves, Array, Array | None], None]:
    """A function that writes a result of type `kind` to a vector register or pair in the active lanes."""
    if operand.kind != "vector":
        raise UnknownInstruction(f"{operand.text} cannot be the result of a vector instruction")
    index = operand.register
    if width(kind) == 64:

        def write_pair(w: Waves, value: Array, mask: Array | None) -> None:
            bits = np.asarray(value).view(np.uint64)
            w.write_vector(index, w.u32, bits.astype(np.uint32), mask)
            w.write_vector(index + 1, w.u32, (bits >> np.uint64(32)).astype(np.uint32), mask)

        return write_pair
    if width(kind) == 16:  # CDNA3: a 16-bit result clears the upper half of the register
        return lambda w, value, mask: w.write_vector(
            index, w.u32, np.asarray(value).view(np.uint16).astype(np.uint32), mask
        )
    view = attrgetter(kind)
    return lambda w, value, mask: w.write_vector(index, view(w), value, mask)


assert NUM_SGPRS == EXEC + 2

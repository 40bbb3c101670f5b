"""Single lanes of vector registers: V_READLANE, V_READFIRSTLANE, V_MBCNT (CDNA3 ISA chapter 12)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .errors import UnknownInstruction
from .operands import Decoder, Operand, reader, scalar_reader, writer
from .parser import Instruction
from .state import LANES, Array, Step, Waves


def _scalar_write(operand: Operand) -> Callable[[Waves, Array], None]:
    if operand.kind != "scalar" or operand.count != 1:
        raise UnknownInstruction(f"{operand.text} cannot hold one lane")
    return lambda w, value: w.write_scalar(operand.register, value)


def read_lane(_: Instruction, operands: list[Operand]) -> Step:
    store, register, lane = _scalar_write(operands[0]), operands[1].register, scalar_reader(operands[2], "u32")

    def step(w: Waves) -> None:
        lanes = np.broadcast_to(lane(w) & np.uint32(63), w.count)
        w.check_lanes(register, (np.arange(w.count), lanes))
        store(w, w.u32[register][np.arange(w.count), lanes])

    return step


def read_first_lane(_: Instruction, operands: list[Operand]) -> Step:
    store, source = _scalar_write(operands[0]), operands[1]
    if source.kind == "scalar":
        read = scalar_reader(source, "u32")
        return lambda w: store(w, read(w))

    def step(w: Waves) -> None:
        lanes = np.argmax(w.exec, axis=1)  # lane 0 when no lane is active, as the ISA says
        w.check_lanes(source.register, (np.arange(w.count), lanes))
        store(w, w.u32[source.register][np.arange(w.count), lanes])

    return step


def count_bits_below(high: bool) -> Decoder:
    below = np.array([((1 << lane) - 1) >> (32 if high else 0) & 0xFFFFFFFF for lane in range(LANES)], np.uint32)

    def decode(_: Instruction, operands: list[Operand]) -> Step:
        mask, add = reader(operands[1], "u32"), reader(operands[2], "u32")
        write = writer(operands[0], "u32")
        return lambda w: write(w, np.bitwise_count(mask(w) & below).astype(np.uint32) + add(w), None)

    return decode

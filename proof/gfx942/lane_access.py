"""Single lanes of vector registers: V_READLANE, V_READFIRSTLANE, V_MBCNT (CDNA3 ISA chapter 12)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .errors import UnknownInstruction
from .operands import Operand, parse_operand, reader, scalar_reader, writer
from .parser import Instruction, Kernel
from .state import LANES, PARTIAL, PENDING, Array, Step, Waves
from .valu import check_modifiers


def decode_lane_access(instruction: Instruction, kernel: Kernel) -> Step | None:
    decode = _DECODERS.get(instruction.opcode)
    if decode is None:
        return None
    check_modifiers(instruction, set())
    return decode([parse_operand(text, kernel) for text in instruction.operands])


def _scalar_write(operand: Operand) -> Callable[[Waves, Array], None]:
    if operand.kind != "scalar" or operand.count != 1:
        raise UnknownInstruction(f"{operand.text} cannot hold one lane")
    return lambda w, value: w.write_scalar(operand.register, value)


def _read_lane(operands: list[Operand]) -> Step:
    store, register, lane = _scalar_write(operands[0]), operands[1].register, scalar_reader(operands[2], "u32")

    def step(w: Waves) -> None:
        lanes = np.broadcast_to(lane(w) & np.uint32(63), w.count)
        _check_lane(w, register, lanes)
        store(w, w.u32[register][np.arange(w.count), lanes])

    return step


def _read_first_lane(operands: list[Operand]) -> Step:
    store, source = _scalar_write(operands[0]), operands[1]
    if source.kind == "scalar":
        read = scalar_reader(source, "u32")
        return lambda w: store(w, read(w))

    def step(w: Waves) -> None:
        lanes = np.argmax(w.exec, axis=1)  # lane 0 when no lane is active, as the ISA says
        _check_lane(w, source.register, lanes)
        store(w, w.u32[source.register][np.arange(w.count), lanes])

    return step


def _check_lane(w: Waves, register: int, lanes: Array) -> None:
    state = w.vector_state[register]
    if state == PENDING or (state == PARTIAL and not w.vector_written[register][np.arange(w.count), lanes].all()):
        w.check_vector(register, all_lanes=True)


def _count_bits_below(high: bool) -> Callable[[list[Operand]], Step]:
    below = np.array([((1 << lane) - 1) >> (32 if high else 0) & 0xFFFFFFFF for lane in range(LANES)], np.uint32)

    def decode(operands: list[Operand]) -> Step:
        mask, add = reader(operands[1], "u32"), reader(operands[2], "u32")
        write = writer(operands[0], "u32")
        return lambda w: write(w, np.bitwise_count(mask(w) & below).astype(np.uint32) + add(w), None)

    return decode


_DECODERS: dict[str, Callable[[list[Operand]], Step]] = {
    "v_readlane_b32": _read_lane,
    "v_readfirstlane_b32": _read_first_lane,
    "v_mbcnt_lo_u32_b32": _count_bits_below(False),
    "v_mbcnt_hi_u32_b32": _count_bits_below(True),
}

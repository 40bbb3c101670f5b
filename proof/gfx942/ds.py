"""LDS instructions (CDNA3 ISA chapter 11): reads, writes, the two-address forms, atomics, lane permutes."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .atomics import apply_atomic
from .context import ActiveLanes, Context
from .errors import UndefinedRead, UnknownInstruction
from .lanes import swizzle_source
from .operands import Operand, parse_operand, reader
from .parser import Instruction, Kernel
from .state import LANES, Array, Waves
from .valu import check_modifiers
from .waits import Outstanding

Step = Callable[[Waves], object]
_PLAIN = re.compile(r"^ds_(read|write)_([bui])(8|16|32|64|96|128)(_d16)?(_hi|_d16_hi)?$")
_TWO = re.compile(r"^ds_(read|write)2(st64)?_b(32|64)$")
_ATOMIC = re.compile(r"^ds_(add|sub|and|or|xor|min|max)(_rtn)?_(u32|i32|b32|f32)$")
_ATOMIC_NAMES = {("min", "u32"): "umin", ("max", "u32"): "umax", ("min", "i32"): "smin", ("max", "i32"): "smax"}


def decode_ds(instruction: Instruction, kernel: Kernel, context: Context) -> Step | None:
    """The closure of an LDS instruction, or None."""
    opcode = instruction.opcode
    operands = [parse_operand(text, kernel) for text in instruction.operands]
    if opcode in ("ds_bpermute_b32", "ds_permute_b32", "ds_swizzle_b32"):
        check_modifiers(instruction, {"offset"})
        return _permute(instruction, operands)
    two, plain, atomic = _TWO.match(opcode), _PLAIN.match(opcode), _ATOMIC.match(opcode)
    if two:
        check_modifiers(instruction, {"offset0", "offset1"})
        size = int(two[3]) // 8
        scale = size * (64 if two[2] else 1)
        offsets = [int(instruction.modifiers.get(f"offset{n}", "0"), 0) * scale for n in range(2)]
        return _read(context, operands, size, offsets) if two[1] == "read" else _write(context, operands, size, offsets)
    offset = int(instruction.modifiers.get("offset", "0"), 0)
    if plain:
        check_modifiers(instruction, {"offset"})
        size, half = int(plain[3]) // 8, "hi" if "_hi" in opcode else "lo" if plain[4] else ""
        if plain[1] == "write":
            return _write(context, operands, size, [offset], shift=16 if half == "hi" else 0)
        return _read(context, operands, size, [offset], signed=plain[2] == "i", half=half)
    if atomic:
        check_modifiers(instruction, {"offset"})
        return _atomic(context, operands, atomic, offset)
    return None


def _read(
    context: Context, operands: list[Operand], size: int, offsets: list[int], signed: bool = False, half: str = ""
) -> Step:
    target, address = operands[0].register, reader(operands[1], "u32")
    words = max(1, size // 4)
    if operands[0].count != words * len(offsets):
        raise UnknownInstruction(f"{operands[0].text} does not fit an LDS read of {size} bytes")

    def step(w: Waves) -> None:
        lanes = context.active(w)
        start = lanes.pick(address(w)).astype(np.int64)
        loaded = [context.lds.read(start + o, size, lanes.slot, lanes.wave, lanes.rows) for o in offsets]
        values = np.concatenate([words for words, _ in loaded])
        if signed:
            up = np.int32(32 - 8 * size)
            values = ((values.view(np.int32) << up) >> up).view(np.uint32)
        if half:
            values = _merge(lanes, w.u32[target], values, half)
        w.vector_load_issued(target, len(values))
        for n, word in enumerate(values):
            lanes.put(w.u32[target + n], word)
        for n, (_, access) in enumerate(loaded):
            # The two reads of a read2 are one instruction: one counter, both accesses kept for the race detector.
            _queue(w, range(target, target + len(values)) if n == 0 else None, access)

    return step


def _queue(w: Waves, registers: range | None, access: object) -> None:
    if registers is None:
        w.queues.lgkm[-1].more.append(access)
    else:
        w.queues.lgkm.append(Outstanding("lds", vector=registers, lds=access))


def _merge(lanes: ActiveLanes, old: Array, values: Array, half: str) -> Array:
    before, new = lanes.pick(old), values & np.uint32(0xFFFF)
    if half == "hi":
        return (before & np.uint32(0xFFFF)) | (new << np.uint32(16))
    return (before & np.uint32(0xFFFF0000)) | new


def _write(context: Context, operands: list[Operand], size: int, offsets: list[int], shift: int = 0) -> Step:
    address, sources = reader(operands[0], "u32"), operands[1:]
    words = max(1, size // 4)
    if any(o.kind != "vector" or o.count != words for o in sources) or len(sources) != len(offsets):
        raise UnknownInstruction(f"the operands do not fit an LDS write of {size} bytes")

    def step(w: Waves) -> None:
        lanes = context.active(w)
        start = lanes.pick(address(w)).astype(np.int64)
        for n, (source, offset) in enumerate(zip(sources, offsets, strict=True)):
            w.check_vector(source.register, words)
            data = np.stack([lanes.pick(w.u32[source.register + k]) >> np.uint32(shift) for k in range(words)])
            if size < 4:
                data &= np.uint32((1 << (8 * size)) - 1)
            access = context.lds.write(start + offset, data, size, lanes.slot, lanes.wave, lanes.rows)
            _queue(w, range(0) if n == 0 else None, access)

    return step


def _atomic(context: Context, operands: list[Operand], match: re.Match[str], offset: int) -> Step:
    returns = bool(match[2])
    target = operands[0] if returns else None
    address, data = reader(operands[int(returns)], "u32"), operands[1 + int(returns)]
    name = "add_f32" if match[3] == "f32" else _ATOMIC_NAMES.get((match[1], match[3]), match[1])

    def step(w: Waves) -> None:
        lanes = context.active(w)
        start = lanes.pick(address(w)).astype(np.int64) + offset
        w.check_vector(data.register)
        place = context.lds.atomic(start, lanes.slot, lanes.wave, lanes.rows)
        old = apply_atomic(name, context.lds.bytes.data, place, lanes.pick(w.u32[data.register])[None])
        if target is not None:
            w.vector_load_issued(target.register, 1)
            lanes.put(w.u32[target.register], old[0])
        registers = range(target.register, target.register + 1) if target else range(0)
        w.queues.lgkm.append(Outstanding("lds", vector=registers))

    return step


def _permute(instruction: Instruction, operands: list[Operand]) -> Step:
    """DS_BPERMUTE reads from lane address/4, DS_PERMUTE sends there, DS_SWIZZLE has a fixed pattern."""
    target = operands[0].register
    name = instruction.opcode.split("_")[1]
    fixed, address = np.arange(LANES), None
    if name == "swizzle":
        fixed = swizzle_source(instruction.modifiers.get("offset", "0"))
        source = operands[1].register
    else:
        source, address = operands[2].register, reader(operands[1], "u32")
    offset = 0 if name == "swizzle" else int(instruction.modifiers.get("offset", "0"), 0)

    def step(w: Waves) -> None:
        if address is None:
            lane = np.broadcast_to(fixed, (w.count, LANES))
        else:
            lane = ((np.broadcast_to(address(w), (w.count, LANES)) + np.uint32(offset)) >> np.uint32(2)) & np.uint32(63)
        lane = lane.astype(np.int64)
        rows = np.arange(w.count)[:, None]
        if name == "permute":
            w.check_vector(source)
            value = np.zeros((w.count, LANES), np.uint32)
            value[np.broadcast_to(rows, lane.shape)[w.exec], lane[w.exec]] = w.u32[source][w.exec]
        else:
            at = lane + rows * LANES
            valid = w.exec.take(at)  # an inactive source lane gives 0
            if w.vector_state[source] == 2:
                w.check_vector(source)
            if w.vector_state[source] and not (w.vector_written[source].take(at) | ~valid)[w.exec].all():
                raise UndefinedRead(f"{instruction.opcode} reads a lane of vector register {source} that nobody wrote")
            value = np.where(valid, w.u32[source].take(at), np.uint32(0))
        w.vector_load_issued(target, 1)
        np.copyto(w.u32[target], value, where=w.exec)
        w.queues.lgkm.append(Outstanding("lds", vector=range(target, target + 1)))

    return step

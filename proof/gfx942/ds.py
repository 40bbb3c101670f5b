"""LDS instructions (CDNA3 ISA chapter 11): reads, writes, the two-address forms, atomic additions, lane permutes."""

from __future__ import annotations

import re

import numpy as np

from .context import Context
from .errors import UnknownInstruction
from .operands import Operand, reader
from .parser import Instruction
from .state import LANES, Array, Step, Waves
from .valu import check_modifiers
from .waits import Outstanding

_PLAIN = re.compile(r"^ds_(read|write)_([bu])(8|16|32|64|96|128)$")
_TWO = re.compile(r"^ds_(read|write)2(st64)?_b(32|64)$")


def decode_ds(instruction: Instruction, operands: list[Operand], context: Context) -> Step | None:
    opcode = instruction.opcode
    two, plain = _TWO.match(opcode), _PLAIN.match(opcode)
    if two:
        check_modifiers(instruction, {"offset0", "offset1"})
        size = int(two[3]) // 8
        scale = size * (64 if two[2] else 1)
        offsets = [int(instruction.modifiers.get(f"offset{n}", "0"), 0) * scale for n in range(2)]
        return _read(context, operands, size, offsets) if two[1] == "read" else _write(context, operands, size, offsets)
    check_modifiers(instruction, {"offset"})
    offset = int(instruction.modifiers.get("offset", "0"), 0)
    if plain:
        access = _write if plain[1] == "write" else _read
        return access(context, operands, int(plain[3]) // 8, [offset])
    if opcode == "ds_bpermute_b32":
        return _bpermute(operands, offset)
    if opcode in ("ds_add_u32", "ds_add_rtn_u32"):
        return _add(context, operands, offset, returns="rtn" in opcode)
    return None


def _read(context: Context, operands: list[Operand], size: int, offsets: list[int]) -> Step:
    target, address = operands[0].register, reader(operands[1], "u32")
    words = max(1, size // 4)
    if operands[0].count != words * len(offsets):
        raise UnknownInstruction(f"{operands[0].text} does not fit an LDS read of {size} bytes")

    def step(w: Waves) -> None:
        lanes = context.active(w)
        start = lanes.pick(address(w)).astype(np.int64)
        loaded = [context.lds.read(start + o, size, lanes.slot, lanes.wave, lanes.rows) for o in offsets]
        values = np.concatenate([words for words, _ in loaded])
        w.vector_load_issued(target, len(values))
        for n, word in enumerate(values):
            lanes.put(w.u32[target + n], word)
        registers = range(target, target + len(values))
        w.queues.lgkm.append(Outstanding("lds", vector=registers, lds=[access for _, access in loaded]))

    return step


def _write(context: Context, operands: list[Operand], size: int, offsets: list[int]) -> Step:
    address, sources = reader(operands[0], "u32"), operands[1:]
    words = max(1, size // 4)
    if any(o.kind != "vector" or o.count != words for o in sources) or len(sources) != len(offsets):
        raise UnknownInstruction(f"the operands do not fit an LDS write of {size} bytes")

    def step(w: Waves) -> None:
        lanes = context.active(w)
        start, written = lanes.pick(address(w)).astype(np.int64), []
        for source, offset in zip(sources, offsets, strict=True):
            w.check_vector(source.register, words)
            data = np.stack([lanes.pick(w.u32[source.register + k]) for k in range(words)])
            if size < 4:
                data &= np.uint32((1 << (8 * size)) - 1)
            written.append(context.lds.write(start + offset, data, size, lanes.slot, lanes.wave, lanes.rows))
        w.queues.lgkm.append(Outstanding("lds", lds=written))

    return step


def _add(context: Context, operands: list[Operand], offset: int, returns: bool) -> Step:
    """Lanes that add to the same address take turns, in lane order."""
    target = operands[0].register if returns else None
    address, data = reader(operands[int(returns)], "u32"), operands[1 + int(returns)]

    def step(w: Waves) -> None:
        lanes = context.active(w)
        start = lanes.pick(address(w)).astype(np.int64) + offset
        w.check_vector(data.register)
        index = context.lds.atomic(start, lanes.slot, lanes.wave, lanes.rows) // 4
        cells, values = context.lds.bytes.data.view(np.uint32), lanes.pick(w.u32[data.register])
        old = np.zeros(len(index), np.uint32)
        for turn in _turns(index):
            old[turn] = cells[index[turn]]
            cells[index[turn]] = old[turn] + values[turn]
        if target is not None:
            w.vector_load_issued(target, 1)
            lanes.put(w.u32[target], old)
        w.queues.lgkm.append(Outstanding("lds", vector=range(0) if target is None else range(target, target + 1)))

    return step


def _turns(index: Array) -> list[Array]:
    """Groups of lanes with distinct addresses; the k-th lane of an address is in group k."""
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    starts = np.r_[True, ordered[1:] != ordered[:-1]] if len(ordered) else np.zeros(0, bool)
    first = np.maximum.accumulate(np.where(starts, np.arange(len(ordered)), 0))
    rank = np.arange(len(ordered)) - first
    return [order[rank == turn] for turn in range(int(rank.max(initial=-1)) + 1)]


def _bpermute(operands: list[Operand], offset: int) -> Step:
    """Each lane reads from lane address / 4; an inactive source lane gives 0."""
    target, address, source = operands[0].register, reader(operands[1], "u32"), operands[2].register

    def step(w: Waves) -> None:
        wanted = np.broadcast_to(address(w), (w.count, LANES)) + np.uint32(offset)
        at = ((wanted >> np.uint32(2)) & np.uint32(63)).astype(np.int64) + np.arange(w.count)[:, None] * LANES
        valid = w.exec.take(at)
        w.check_lanes(source, np.divmod(at[valid & w.exec], LANES))
        value = np.where(valid, w.u32[source].take(at), np.uint32(0))
        w.vector_load_issued(target, 1)
        np.copyto(w.u32[target], value, where=w.exec)
        w.queues.lgkm.append(Outstanding("lds", vector=range(target, target + 1)))

    return step

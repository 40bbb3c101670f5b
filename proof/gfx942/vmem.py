"""Vector memory: global accesses, and buffer accesses with range checking (CDNA3 ISA chapters 9 and 10).

A result becomes readable only after the s_waitcnt for it.
"""

from __future__ import annotations

import re

import numpy as np

from .addresses import Address, address_of
from .context import ActiveLanes, Context
from .errors import UnknownInstruction
from .operands import Operand
from .parser import Instruction
from .state import Array, Step, Waves
from .valu import check_modifiers
from .waits import Outstanding

_NAME = re.compile(r"^(buffer|global)_(load|store)_(\w+)$")
_BYTES = {"ubyte": 1, "byte": 1, "ushort": 2, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}


def decode_vmem(instruction: Instruction, operands: list[Operand], context: Context) -> Step | None:
    match = _NAME.match(instruction.opcode)
    size = _BYTES.get(match[3]) if match else None
    if match is None or size is None:
        return None
    space, action, _ = match.groups()
    check_modifiers(instruction, {"sc0", "sc1", "nt", "offset"} | ({"offen"} if space == "buffer" else set()))
    place = 0 if action == "load" or space == "buffer" else 1
    data, rest = operands[place], operands[:place] + operands[place + 1 :]  # an address may be the same register
    if data.kind != "vector" or data.count != max(1, size // 4):
        raise UnknownInstruction(f"{data.text} does not fit {instruction.opcode}")
    offset = int(instruction.modifiers.get("offset", "0"), 0)
    address = address_of(instruction, space, rest, offset)
    return (_load if action == "load" else _store)(context, address, size, data)


def _fetch(context: Context, lanes: ActiveLanes, at: Array, inside: Array | None, size: int) -> Array:
    if inside is None:
        return context.memory.load(at, size, lanes.group)
    words = np.zeros((max(1, size // 4), lanes.count), np.uint32)
    for n, ok in enumerate(inside):
        words[n, ok] = context.memory.load(at[ok] + np.uint64(4 * n), min(size, 4), lanes.group[ok])[0]
    return words


def _load(context: Context, address: Address, size: int, data: Operand) -> Step:
    def step(w: Waves) -> None:
        lanes = context.active(w)
        at, inside = address(w, lanes, size)
        words = _fetch(context, lanes, at, inside, size)
        w.vector_load_issued(data.register, data.count)
        for n, word in enumerate(words):
            lanes.put(w.u32[data.register + n], word)
        w.queues.vm.append(Outstanding("vm", vector=range(data.register, data.register + data.count)))

    return step


def _store(context: Context, address: Address, size: int, data: Operand) -> Step:
    def step(w: Waves) -> None:
        lanes = context.active(w)
        at, inside = address(w, lanes, size)
        w.check_vector(data.register, data.count)
        words = np.stack([lanes.pick(w.u32[data.register + n]) for n in range(data.count)])
        if inside is None:
            context.memory.store(at, words, size, lanes.group)
        else:
            for n, ok in enumerate(inside):
                context.memory.store(at[ok] + np.uint64(4 * n), words[n : n + 1, ok], min(size, 4), lanes.group[ok])
        w.queues.vm.append(Outstanding("vm"))

    return step

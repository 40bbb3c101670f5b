"""Vector memory: global, flat and scratch accesses, buffer accesses with range checking, loads into LDS, atomics.

CDNA3 ISA chapter 9 (vector memory) and 10 (flat). A result becomes readable only after the s_waitcnt for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .addresses import Address, address_of
from .atomics import ATOMICS, apply_atomic
from .context import ActiveLanes, Context
from .errors import UnknownInstruction
from .forms import FORMS, Form, extend
from .operands import Operand, parse_operand
from .parser import Instruction, Kernel
from .scratch import decode_scratch
from .state import M0, Array, Waves
from .valu import check_modifiers
from .waits import Outstanding

Step = Callable[[Waves], object]
_NAME = re.compile(r"^(buffer|global|flat|scratch)_(load|store|atomic)_(lds_)?(\w+)$")
_CACHE = {"sc0", "sc1", "nt", "glc", "slc"}


def decode_vmem(instruction: Instruction, kernel: Kernel, context: Context) -> Step | None:
    """The closure of a vector memory instruction, or None."""
    match = _NAME.match(instruction.opcode)
    if not match:
        return None
    space, action, to_lds, name = match.groups()
    check_modifiers(instruction, _CACHE | {"offset"} | ({"offen", "idxen", "lds"} if space == "buffer" else set()))
    operands = [parse_operand(text, kernel) for text in instruction.operands]
    offset = int(instruction.modifiers.get("offset", "0"), 0)
    if action == "atomic":
        return _decode_atomic(instruction, name, space, operands, offset, context)
    form = FORMS.get(name)
    if form is None:
        return None
    if to_lds or "lds" in instruction.modifiers:
        address = address_of(instruction, space, operands, offset, context, None)
        return _load_to_lds(context, address, form, offset)
    if space == "scratch":
        return decode_scratch(action, form, operands, offset, context)
    place = 0 if action == "load" or space == "buffer" else 1
    data, rest = operands[place], operands[:place] + operands[place + 1 :]  # an address may be the same register
    if data.kind != "vector" or data.count != form.words:
        raise UnknownInstruction(f"{data.text} does not fit {instruction.opcode}")
    address = address_of(instruction, space, rest, offset, context, action)
    if action == "load":
        return _load(context, address, form, data, flat=space == "flat")
    return _store(context, address, form, data, flat=space == "flat")


# -- loads and stores -----------------------------------------------------------------------------------------------
def _fetch(context: Context, lanes: ActiveLanes, at: Array, inside: Array | None, form: Form) -> Array:
    if inside is None:
        return context.memory.load(at, form.size, lanes.group)
    words = np.zeros((form.words, lanes.count), np.uint32)
    for n, ok in enumerate(inside):
        words[n, ok] = context.memory.load(at[ok] + np.uint64(4 * n), min(form.size, 4), lanes.group[ok])[0]
    return words


def _issue(w: Waves, item: Outstanding, flat: bool) -> None:
    item.counters = 2 if flat else 1
    w.queues.vm.append(item)
    if flat:
        w.queues.lgkm.append(item)


def _load(context: Context, address: Address, form: Form, data: Operand, flat: bool) -> Step:
    def step(w: Waves) -> None:
        lanes = context.active(w)
        at, inside = address(w, lanes, form.size)
        words = extend(_fetch(context, lanes, at, inside, form), form)
        if form.d16:
            words = _merge_half(w, lanes, data.register, words, form)
        w.vector_load_issued(data.register, form.words)
        for n, word in enumerate(words):
            lanes.put(w.u32[data.register + n], word)
        _issue(w, Outstanding("vm", vector=range(data.register, data.register + form.words)), flat)

    return step


def _merge_half(w: Waves, lanes: ActiveLanes, register: int, words: Array, form: Form) -> Array:
    old = lanes.pick(w.u32[register])  # the other half may be undefined: copying it is not a use
    half = words[0] & np.uint32(0xFFFF)
    if form.d16 == "hi":
        return ((old & np.uint32(0xFFFF)) | (half << np.uint32(16)))[None]
    return ((old & np.uint32(0xFFFF0000)) | half)[None]


def _store(context: Context, address: Address, form: Form, data: Operand, flat: bool) -> Step:
    shift = np.uint32(16 if form.d16 == "hi" else 0)

    def step(w: Waves) -> None:
        lanes = context.active(w)
        at, inside = address(w, lanes, form.size)
        w.check_vector(data.register, form.words)
        words = np.stack([lanes.pick(w.u32[data.register + n]) >> shift for n in range(form.words)])
        if inside is None:
            context.memory.store(at, words, form.size, lanes.group)
        else:
            for n, ok in enumerate(inside):
                context.memory.store(
                    at[ok] + np.uint64(4 * n), words[n : n + 1, ok], min(form.size, 4), lanes.group[ok]
                )
        _issue(w, Outstanding("vm"), flat)

    return step


def _load_to_lds(context: Context, address: Address, form: Form, offset: int) -> Step:
    """LDS address = M0[15:0] + instruction offset + 4 * lane (CDNA3 ISA 9.1.9); an out-of-range lane stores 0."""

    def step(w: Waves) -> None:
        w.check_scalar(M0)
        lanes = context.active(w)
        at, inside = address(w, lanes, form.size)
        words = extend(_fetch(context, lanes, at, inside, form), form)
        base = (w.s32[M0].astype(np.int64) & 0xFFFF)[lanes.rows]
        target = base + offset + lanes.lanes * 4
        access = context.lds.write(target, words, max(4, form.size), lanes.slot, lanes.wave, lanes.rows, dma=True)
        w.queues.vm.append(Outstanding("vm", lds=access))

    return step


# -- atomics --------------------------------------------------------------------------------------------------------
def _decode_atomic(
    instruction: Instruction, name: str, space: str, operands: list[Operand], offset: int, context: Context
) -> Step:
    if name not in ATOMICS:
        raise UnknownInstruction(f"atomic {instruction.opcode} is not modelled")
    returns = "sc0" in instruction.modifiers
    if space == "buffer":
        data, rest, result = operands[0], operands[1:], operands[0]
    elif returns:
        result, data, rest = operands[0], operands[2], [operands[1], *operands[3:]]
    else:
        result, data, rest = operands[1], operands[1], [operands[0], *operands[2:]]
    address = address_of(instruction, space, rest, offset, context, "atomic")
    size = ATOMICS[name].size

    def step(w: Waves) -> None:
        lanes = context.active(w)
        at, inside = address(w, lanes, size)
        w.check_vector(data.register, data.count)
        values = np.stack([lanes.pick(w.u32[data.register + n]) for n in range(data.count)])
        ok = np.ones(lanes.count, bool) if inside is None else inside.all(axis=0)
        old = np.zeros((size // 4, lanes.count), np.uint32)
        offsets = context.memory.update(at[ok], size)
        old[:, ok] = apply_atomic(name, context.memory.raw, offsets, values[:, ok])
        target = range(0)
        if returns:
            target = range(result.register, result.register + size // 4)
            w.vector_load_issued(result.register, size // 4)
            for n, word in enumerate(old):
                lanes.put(w.u32[result.register + n], word)
        _issue(w, Outstanding("vm", vector=target), space == "flat")

    return step

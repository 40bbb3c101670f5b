"""Vector memory: global, flat and scratch accesses, buffer accesses with range checking, loads into LDS, atomics.

CDNA3 ISA chapter 9 (vector memory) and 10 (flat). A result becomes readable only after the s_waitcnt for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .atomics import ATOMICS, apply_atomic
from .byte_store import join_bytes
from .context import ActiveLanes, Context
from .errors import OutOfBounds, UndefinedRead, UnknownInstruction
from .operands import Operand, parse_operand, reader, scalar_reader
from .parser import Instruction, Kernel
from .state import LANES, M0, Array, Waves
from .valu import check_modifiers
from .waits import Outstanding

Step = Callable[[Waves], object]
_NAME = re.compile(r"^(buffer|global|flat|scratch)_(load|store|atomic)_(lds_)?(\w+)$")
_CACHE = {"sc0", "sc1", "nt", "glc", "slc"}


@dataclass(frozen=True)
class Form:
    """How many bytes move per lane and how they sit in registers."""

    size: int
    signed: bool = False
    d16: str = ""  # "lo" or "hi": a 16-bit half, the other half stays

    @property
    def words(self) -> int:
        """Registers per lane."""
        return max(1, self.size // 4)


_FORMS = {
    **{"dword": Form(4), "dwordx2": Form(8), "dwordx3": Form(12), "dwordx4": Form(16)},
    **{"ubyte": Form(1), "sbyte": Form(1, True), "ushort": Form(2), "sshort": Form(2, True)},
    **{"byte": Form(1), "short": Form(2), "ubyte_d16": Form(1, d16="lo"), "ubyte_d16_hi": Form(1, d16="hi")},
    **{"sbyte_d16": Form(1, True, "lo"), "sbyte_d16_hi": Form(1, True, "hi")},
    **{"short_d16": Form(2, d16="lo"), "short_d16_hi": Form(2, d16="hi"), "byte_d16_hi": Form(1, d16="hi")},
}

# Gives the byte address of each active lane, and per word whether it is in range (None: all are).
Address = Callable[[Waves, ActiveLanes, int], tuple[Array, Array | None]]


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
    form = _FORMS.get(name)
    if form is None:
        return None
    if to_lds or "lds" in instruction.modifiers:
        address = _address(instruction, space, operands, offset, context, None)
        return _load_to_lds(context, address, form, offset)
    if space == "scratch":
        return _decode_scratch(action, form, operands, offset, context)
    place = 0 if action == "load" or space == "buffer" else 1
    data, rest = operands[place], operands[:place] + operands[place + 1 :]  # an address may be the same register
    if data.kind != "vector" or data.count != form.words:
        raise UnknownInstruction(f"{data.text} does not fit {instruction.opcode}")
    address = _address(instruction, space, rest, offset, context, action)
    if action == "load":
        return _load(context, address, form, data, flat=space == "flat")
    return _store(context, address, form, data, flat=space == "flat")


# -- addresses ------------------------------------------------------------------------------------------------------
def _address(
    instruction: Instruction, space: str, operands: list[Operand], offset: int, context: Context, action: str | None
) -> Address:
    if space == "buffer":
        return _buffer_address(instruction, operands, offset, context, action or "load")
    vector, base = operands[0], operands[1] if len(operands) > 1 else None
    if base is None or base.kind == "off":
        read = reader(vector, "u64")
        return lambda w, lanes, size: (lanes.pick(read(w)) + np.uint64(offset & 0xFFFFFFFFFFFFFFFF), None)
    low, high = reader(vector, "u32"), reader(base, "u64")
    return lambda w, lanes, size: (
        lanes.pick(low(w).astype(np.uint64) + high(w)) + np.uint64(offset & 0xFFFFFFFFFFFFFFFF),
        None,
    )


def _buffer_address(
    instruction: Instruction, operands: list[Operand], offset: int, context: Context, action: str
) -> Address:
    vector, resource, scalar = operands
    index_on, offset_on = "idxen" in instruction.modifiers, "offen" in instruction.modifiers
    if resource.kind != "scalar" or resource.count != 4:
        raise UnknownInstruction(f"{resource.text} is not a buffer resource")
    part = [Operand("vector", vector.text, vector.register + n) for n in range(2)]
    read_index = reader(part[0], "u32") if index_on else None
    read_offset = reader(part[int(index_on)], "u32") if offset_on else None
    read_scalar = scalar_reader(scalar, "u32")

    def address(w: Waves, lanes: ActiveLanes, size: int) -> tuple[Array, Array | None]:
        w.check_scalar(resource.register, 4)
        w0, w1, records, w3 = (w.s32[resource.register + n].astype(np.int64)[lanes.rows] for n in range(4))
        if (w1 >> 31).any() or ((w3 >> 23) & 1).any():
            raise UnknownInstruction("a swizzled or thread-id buffer resource is not modelled")
        base, stride = w0 | ((w1 & 0xFFFF) << 32), (w1 >> 16) & 0x3FFF
        extra = np.broadcast_to(np.asarray(read_scalar(w)), w.count).astype(np.int64)[lanes.rows]
        at = np.full(lanes.count, offset, np.int64)
        if read_offset:
            at = at + lanes.pick(read_offset(w)).astype(np.int64)
        steps = np.arange(max(1, size // 4))[:, None] * 4
        last = at + steps + min(size, 4) - 1
        index = lanes.pick(read_index(w)).astype(np.int64) if read_index else np.zeros(lanes.count, np.int64)
        # Structured (stride != 0): the index is checked; raw: the byte offset, each word by itself.
        raw = stride == 0
        inside = np.where(raw, last < records, (index < records) & ((last < stride) | (not index_on)))
        _reject_ambiguous(raw, at + steps, last, records, extra)
        if not inside.all():
            context.tallies[f"out_of_range_{action}s"] += int((~inside).any(axis=0).sum())
        return (base + extra + index * stride + at).astype(np.uint64), None if inside.all() else inside

    return address


def _reject_ambiguous(raw: Array, first: Array, last: Array, records: Array, extra: Array) -> None:
    """Sources disagree whether the scalar offset takes part in the range check: no kernel may depend on it."""
    if extra.any() and (raw & (last < records) & (last >= records - extra)).any():
        raise OutOfBounds("a buffer access is in range or not depending on how the scalar offset is checked")
    if (records & 3).any() and (raw & (first < records) & (last >= records)).any():
        raise OutOfBounds("a buffer access straddles the end of the buffer inside one word")


# -- loads and stores -----------------------------------------------------------------------------------------------
def _fetch(context: Context, lanes: ActiveLanes, at: Array, inside: Array | None, form: Form) -> Array:
    if inside is None:
        return context.memory.load(at, form.size, lanes.group)
    words = np.zeros((form.words, lanes.count), np.uint32)
    for n, ok in enumerate(inside):
        words[n, ok] = context.memory.load(at[ok] + np.uint64(4 * n), min(form.size, 4), lanes.group[ok])[0]
    return words


def _extend(words: Array, form: Form) -> Array:
    if not form.signed:
        return words
    shift = np.int32(32 - 8 * form.size)
    return ((words.view(np.int32) << shift) >> shift).view(np.uint32)


def _issue(w: Waves, item: Outstanding, flat: bool) -> None:
    item.counters = 2 if flat else 1
    w.queues.vm.append(item)
    if flat:
        w.queues.lgkm.append(item)


def _load(context: Context, address: Address, form: Form, data: Operand, flat: bool) -> Step:
    def step(w: Waves) -> None:
        lanes = context.active(w)
        at, inside = address(w, lanes, form.size)
        words = _extend(_fetch(context, lanes, at, inside, form), form)
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
        words = _extend(_fetch(context, lanes, at, inside, form), form)
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
    address = _address(instruction, space, rest, offset, context, "atomic")
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


# -- scratch --------------------------------------------------------------------------------------------------------
def _decode_scratch(action: str, form: Form, operands: list[Operand], offset: int, context: Context) -> Step:
    place = 0 if action == "load" else 1
    data, (vector, scalar) = operands[place], operands[:place] + operands[place + 1 :]
    readers = []
    if vector.kind == "vector":
        readers.append(reader(vector, "u32"))
    if scalar.kind != "off":
        readers.append(reader(scalar, "u32"))

    def step(w: Waves) -> None:
        lanes = context.active(w)
        start = np.full((w.count, LANES), offset, np.int64)
        for read in readers:
            start = start + read(w).astype(np.int64)
        at = lanes.pick(start)[None] + np.arange(form.size)[:, None]
        memory, written = w.rows.scratch, w.rows.scratch_written
        if (at < 0).any() or (at >= memory.shape[2]).any():
            raise OutOfBounds(f"scratch access outside the {memory.shape[2]} bytes of a lane")
        place = (lanes.rows[None], lanes.lanes[None], at)
        if action == "store":
            w.check_vector(data.register, form.words)
            raw = np.stack(
                [lanes.pick(w.u32[data.register + n // 4]) >> np.uint32(8 * (n % 4)) for n in range(form.size)]
            )
            memory[place], written[place] = raw.astype(np.uint8), True
            w.queues.vm.append(Outstanding("vm"))
            return
        if not written[place].all():
            raise UndefinedRead("a scratch load reads bytes that nobody wrote")
        words = _extend(join_bytes(memory[place]), form)
        w.vector_load_issued(data.register, form.words)
        for n, word in enumerate(words):
            lanes.put(w.u32[data.register + n], word)
        w.queues.vm.append(Outstanding("vm", vector=range(data.register, data.register + form.words)))

    return step

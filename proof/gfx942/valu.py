"""Decoding of vector ALU instructions: operands, input and output modifiers, EXEC; one closure per instruction."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .errors import UnknownInstruction
from .lanes import apply_dpp, sdwa_reader, sdwa_writer
from .operands import Operand, Reader, reader, writer
from .parser import Instruction
from .state import READY, Array, Step, Waves
from .valu_ops import OPS, SATURATED, Op

_COPIES = {"v_mov_b32", "v_mov_b64"}
_OP_SEL = {"op_sel"}
_SDWA = {"dst_sel", "dst_unused", "src0_sel", "src1_sel"}
_DPP = {"quad_perm", "row_shr", "row_ror", "row_half_mirror", "row_bcast", "row_mask", "bank_mask", "bound_ctrl"}


def plain(instruction: Instruction, operands: list[Operand]) -> Step | None:
    """The closure of a plain vector instruction, or None if the opcode is not in the table."""
    target, *sources = operands
    if instruction.opcode == "v_fmac_f32":
        sources.append(target)
    op = OPS.get("v_fma_f32" if instruction.opcode in ("v_fmac_f32", "v_fmamk_f32") else instruction.opcode)
    return _decode(instruction, op, target, sources) if op else None


def check_modifiers(instruction: Instruction, allowed: set[str]) -> None:
    """Raise on a modifier that is not modelled for this instruction."""
    for name in instruction.modifiers:
        if name not in allowed:
            raise UnknownInstruction(f"modifier {name} of {instruction.opcode} is not modelled")


def source_readers(instruction: Instruction, kinds: tuple[str, ...], operands: list[Operand]) -> list[Reader]:
    """Readers of the sources, with SDWA selection and op_sel applied."""
    if len(operands) != len(kinds):
        raise UnknownInstruction(f"{instruction.opcode} with {len(operands)} sources, {len(kinds)} expected")
    if instruction.encoding == "sdwa":
        selects = [instruction.modifiers.get(f"src{n}_sel", "DWORD") for n in range(len(kinds))]
        return [sdwa_reader(o, k, s) for o, k, s in zip(operands, kinds, selects, strict=True)]
    high = instruction.bits("op_sel", len(kinds))
    return [reader(o, k, h) for o, k, h in zip(operands, kinds, high, strict=True)]


def _decode(instruction: Instruction, op: Op, target: Operand, sources: list[Operand]) -> Step:
    check_modifiers(instruction, _OP_SEL | _SDWA | _DPP | {"clamp"})
    if instruction.encoding in ("dpp", "e64_dpp"):
        return _decode_dpp(instruction, op, target, sources)
    if instruction.opcode in _COPIES and not instruction.modifiers and sources[0].kind == "vector":
        return _copy(target, sources[0])
    if any(instruction.bits("op_sel", len(sources) + 1)[len(sources) :]):  # the bit after those of the sources
        raise UnknownInstruction("op_sel on the result is not modelled")
    function = _clamped(instruction, op)
    readers = source_readers(instruction, op.sources, sources)
    write = sdwa_writer(instruction, target, op.result) if instruction.encoding == "sdwa" else writer(target, op.result)
    if len(readers) == 1:
        (a,) = readers
        return lambda w: write(w, function(a(w)), None)
    if len(readers) == 2:
        a, b = readers
        return lambda w: write(w, function(a(w), b(w)), None)
    a, b, c = readers
    return lambda w: write(w, function(a(w), b(w), c(w)), None)


def _clamped(instruction: Instruction, op: Op) -> Callable[..., Array]:
    if "clamp" not in instruction.modifiers:
        return op.function
    if instruction.opcode not in SATURATED:
        raise UnknownInstruction(f"clamp on {instruction.opcode} is not modelled")
    return SATURATED[instruction.opcode]


def _copy(target: Operand, source: Operand) -> Step:
    """A move copies also what was never written: copying is not a use (phi nodes of undefined values)."""
    indices = [(target.register + n, source.register + n) for n in range(target.count)]

    def step(w: Waves) -> None:
        values = []
        for _, index in indices:
            if w.vector_state[index] == READY:
                values.append((w.u32[index], None))
            else:
                if w.vector_state[index] == 2:
                    w.check_vector(index)
                values.append((w.u32[index].copy(), w.vector_written[index].copy()))
        for (index, _), (value, written) in zip(indices, values, strict=True):
            if written is not None and not written[w.exec].all():
                copy_undefined(w, index, value, written)
            else:
                w.write_vector(index, w.u32, value)

    return step


def copy_undefined(w: Waves, index: int, value: Array, written: Array) -> None:
    w.before_vector_write(index)
    if w.vector_state[index] == READY:
        w.vector_written[index] = True
    np.copyto(w.u32[index], value, where=w.exec)
    np.copyto(w.vector_written[index], written, where=w.exec)
    w.vector_state[index] = 1


def _decode_dpp(instruction: Instruction, op: Op, target: Operand, sources: list[Operand]) -> Step:
    permuted = apply_dpp(instruction, sources[0], op.sources[0])
    others = [reader(o, k) for o, k in zip(sources[1:], op.sources[1:], strict=True)]
    write = writer(target, op.result)

    def step(w: Waves) -> None:
        value, mask = permuted(w)
        write(w, op.function(value, *(read(w) for read in others)), mask)

    return step

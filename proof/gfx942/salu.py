"""Scalar ALU, branches and program control (CDNA3 ISA chapter 12: SOP1, SOP2, SOPK, SOPC, SOPP)."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from .errors import UnknownInstruction
from .operands import DTYPES, Operand, scalar_reader, width
from .parser import Instruction
from .state import EXEC, VCC, Array, Step, Waves

u32, u64, i64 = np.uint32, np.uint64, np.int64

# name -> (source types, result type, function, how SCC is set: "" not, "nonzero", or "pair" = function gives it)
_Row = tuple[tuple[str, ...], str, Callable[..., Any], str]
_OPS: dict[str, _Row] = {}


def _op(names: str, sources: str, result: str, function: Callable[..., Any], scc: str = "") -> None:
    for name in names.split():
        _OPS[name] = (tuple(sources.split()), result, function, scc)


def _bitwise(name: str, function: Callable[..., Array]) -> None:
    for bits in ("32", "64"):
        _op(f"s_{name}_b{bits}", f"u{bits} u{bits}", f"u{bits}", function, "nonzero")


_bitwise("and", lambda a, b: a & b)
_bitwise("or", lambda a, b: a | b)
_bitwise("xor", lambda a, b: a ^ b)
_bitwise("andn2", lambda a, b: a & ~b)
_bitwise("orn2", lambda a, b: a | ~b)
for _b in ("32", "64"):
    _T = DTYPES[f"u{_b}"]
    _M = _T(int(_b) - 1)
    _op(f"s_lshl_b{_b}", f"u{_b} u32", f"u{_b}", lambda a, b, t=_T, m=_M: a << (b.astype(t) & m), "nonzero")
    _op(f"s_lshr_b{_b}", f"u{_b} u32", f"u{_b}", lambda a, b, t=_T, m=_M: a >> (b.astype(t) & m), "nonzero")
    _op(f"s_not_b{_b}", f"u{_b}", f"u{_b}", lambda a: ~a, "nonzero")
    _op(f"s_mov_b{_b}", f"u{_b}", f"u{_b}", lambda a: a)
    _op(f"s_bcnt1_i32_b{_b}", f"u{_b}", "u32", lambda a: np.bitwise_count(a).astype(u32), "nonzero")
_op("s_ashr_i32", "i32 u32", "i32", lambda a, b: a >> (b & u32(31)).astype(np.int32), "nonzero")


def _bfe(value: Array, control: Array) -> tuple[Array, Array]:
    """The field as an unsigned number, and its width."""
    offset, size = (control & u32(31)).astype(u64), ((control >> u32(16)) & u32(0x7F)).astype(u64)
    size = np.minimum(size, u64(32) - offset)
    return (value.astype(u64) >> offset) & ((u64(1) << size) - u64(1)), size


def _bfe_i32(value: Array, control: Array) -> Array:
    field, size = _bfe(value, control)
    sign = np.where(size > 0, u64(1) << np.maximum(size, u64(1)) - u64(1), u64(0))
    return ((field ^ sign) - sign).astype(u32)


_op("s_bfe_u32", "u32 u32", "u32", lambda value, control: _bfe(value, control)[0].astype(u32), "nonzero")
_op("s_bfe_i32", "u32 u32", "u32", _bfe_i32, "nonzero")


def _unsigned(total: Array) -> tuple[Array, Array]:
    return (total & 0xFFFFFFFF).astype(u32), (total < 0) | (total > 0xFFFFFFFF)


def _signed(total: Array) -> tuple[Array, Array]:
    return (total & 0xFFFFFFFF).astype(u32), (total < -(2**31)) | (total >= 2**31)


def _wide(a: Array) -> Array:
    return np.asarray(a).astype(i64)


_op("s_add_u32", "u32 u32", "u32", lambda a, b: _unsigned(_wide(a) + _wide(b)), "pair")
_op("s_addc_u32", "u32 u32 scc", "u32", lambda a, b, c: _unsigned(_wide(a) + _wide(b) + c), "pair")
_op("s_subb_u32", "u32 u32 scc", "u32", lambda a, b, c: _unsigned(_wide(a) - _wide(b) - c), "pair")
_op("s_add_i32", "i32 i32", "u32", lambda a, b: _signed(_wide(a) + _wide(b)), "pair")
_op("s_sub_i32", "i32 i32", "u32", lambda a, b: _signed(_wide(a) - _wide(b)), "pair")
_op("s_mul_i32", "u32 u32", "u32", lambda a, b: a * b)
_op("s_mul_hi_u32", "u32 u32", "u32", lambda a, b: ((a.astype(u64) * b.astype(u64)) >> u64(32)).astype(u32))
_op("s_mul_hi_i32", "i32 i32", "i32", lambda a, b: ((_wide(a) * _wide(b)) >> i64(32)).astype(np.int32))
for _n in (1, 2, 3, 4):
    _op(f"s_lshl{_n}_add_u32", "u32 u32", "u32", lambda a, b, n=_n: _unsigned((_wide(a) << i64(n)) + _wide(b)), "pair")
for _t in ("u", "i"):
    _op(f"s_min_{_t}32", f"{_t}32 {_t}32", f"{_t}32", lambda a, b: (np.minimum(a, b), a <= b), "pair")
    _op(f"s_max_{_t}32", f"{_t}32 {_t}32", f"{_t}32", lambda a, b: (np.maximum(a, b), a >= b), "pair")
_op("s_abs_i32", "i32", "i32", np.abs, "nonzero")
_op("s_cselect_b32", "u32 u32 scc", "u32", lambda a, b, c: np.where(c, a, b))
_op("s_cselect_b64", "u64 u64 scc", "u64", lambda a, b, c: np.where(c, a, b))
_op("s_brev_b32", "u32", "u32", lambda a: np.array([int(f"{int(x):032b}"[::-1], 2) for x in np.atleast_1d(a)], u32))


_op("s_bitset1_b32", "u32 self", "u32", lambda a, old: old | (u32(1) << (a & u32(31))))
_op("s_movk_i32", "i32", "i32", lambda a: a)
_op("s_addk_i32", "i32 self", "u32", lambda a, old: _signed(_wide(old.view(np.int32)) + _wide(a)), "pair")
_op("s_mulk_i32", "i32 self", "u32", lambda a, old: (_wide(old.view(np.int32)) * _wide(a) & 0xFFFFFFFF).astype(u32))


def decode_salu(instruction: Instruction, operands: list[Operand]) -> Step | None:
    """The closure of a scalar instruction other than branches, waits and loads, or None."""
    opcode = instruction.opcode
    if re.match(r"^s_\w+k_(\w+_)?i32$", opcode):  # a 16-bit immediate is sign-extended
        operands = [operands[0], replace(operands[1], number=(int(operands[1].number) & 0xFFFF ^ 0x8000) - 0x8000)]
    compare = re.match(r"^s_cmpk?_(eq|lg|gt|ge|lt|le)_([ui]32|u64)$", opcode)
    if compare:
        return _compare(operands, operator.ne if compare[1] == "lg" else getattr(operator, compare[1]), compare[2])
    if opcode == "s_and_saveexec_b64":
        return _and_save_exec(operands)
    bit = re.match(r"^s_bitcmp([01])_b32$", opcode)
    if bit:
        wanted = int(bit[1])
        return _compare(operands, lambda value, at: ((value >> (at & u32(31))) & u32(1)) == wanted, "u32")
    if opcode in _OPS:
        return _table(operands, _OPS[opcode])
    return None


def _target(operand: Operand) -> int:
    if operand.kind != "scalar":
        raise UnknownInstruction(f"{operand.text} cannot be the result of a scalar instruction")
    return operand.register


def _write(register: int, kind: str) -> Callable[[Waves, Array], None]:
    if width(kind) == 64:
        return lambda w, value: w.write_scalar64(register, np.asarray(value).view(u64))
    return lambda w, value: w.write_scalar(register, np.asarray(value).view(u32))


def _table(operands: list[Operand], row: _Row) -> Step:
    kinds, result, function, scc = row
    register = _target(operands[0])
    write = _write(register, result)
    readers = [scalar_reader(o, k) for o, k in zip(operands[1:], kinds, strict=False)]
    with_scc, with_self = "scc" in kinds, "self" in kinds

    def step(w: Waves) -> None:
        sources = [read(w) for read in readers]
        if with_scc:
            sources.append(w.scc)
        if with_self:
            w.check_scalar(register)
            sources.append(w.s32[register])
        value = function(*sources)
        if scc == "pair":
            value, flag = value
            w.scc = np.array(np.broadcast_to(flag, w.count))
        elif scc:
            w.scc = np.array(np.broadcast_to(np.not_equal(value, 0), w.count))
        write(w, value)

    return step


def _compare(operands: list[Operand], condition: Callable[[Array, Array], Array], kind: str) -> Step:
    a, b = (scalar_reader(operand, kind) for operand in operands)

    def step(w: Waves) -> None:
        w.scc = np.array(np.broadcast_to(condition(a(w), b(w)), w.count))

    return step


def _and_save_exec(operands: list[Operand]) -> Step:
    register, source = _target(operands[0]), scalar_reader(operands[1], "u64")
    current = scalar_reader(Operand("scalar", "exec", EXEC, 2), "u64")

    def step(w: Waves) -> None:
        old, mask = current(w), source(w)
        w.write_scalar64(register, old)
        new = np.broadcast_to(mask & old, w.count)
        w.write_scalar64(EXEC, new)
        w.scc = np.array(new != 0)

    return step


def branch_condition(opcode: str) -> Callable[[Waves], Array] | None:
    """Condition of a branch, for each wave; None if `opcode` is not a conditional branch."""

    def nonzero(register: int) -> Callable[[Waves], Array]:
        def condition(w: Waves) -> Array:
            w.check_scalar(register, 2)
            return (w.s32[register] | w.s32[register + 1]) != 0

        return condition

    table: dict[str, Callable[[Waves], Array]] = {
        "s_cbranch_scc0": lambda w: ~w.scc,
        "s_cbranch_scc1": lambda w: w.scc,
        "s_cbranch_vccz": lambda w: ~nonzero(VCC)(w),
        "s_cbranch_vccnz": nonzero(VCC),
        "s_cbranch_execz": lambda w: ~nonzero(EXEC)(w),
        "s_cbranch_execnz": nonzero(EXEC),
    }
    return table.get(opcode)

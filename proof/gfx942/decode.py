"""From a parsed kernel to closures: each instruction is decoded once and then run for batches of waves."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .compare import carry, compare, mad_64, select
from .context import Context
from .division import div_fmas, div_scale
from .ds import decode_ds
from .errors import MachineError, UnknownInstruction
from .lane_access import count_bits_below, read_first_lane, read_lane
from .mfma import mfma
from .mix import fma_mix
from .operands import Decoder, parse_operand
from .packed import PACKED, packed
from .parser import Instruction, Kernel
from .salu import branch_condition, decode_salu
from .smem import decode_smem
from .state import Array, Step, Waves
from .valu import check_modifiers, plain
from .vmem import decode_vmem

# Instructions that change no state that the interpreter models: timing and priorities.
_NO_EFFECT = {"s_nop", "s_sleep", "s_setprio"}
# Vector instructions that are no plain functions of their sources: the modifiers that are modelled, and the decoder.
_VECTOR: dict[str, tuple[set[str], Decoder]] = {
    "v_cndmask_b32": ({"src0_sel", "src1_sel", "dst_sel", "dst_unused"}, select),
    "v_add_co_u32": (set(), carry(False, False, False)),
    "v_sub_co_u32": (set(), carry(True, False, False)),
    "v_subrev_co_u32": (set(), carry(True, True, False)),
    "v_addc_co_u32": (set(), carry(False, False, True)),
    "v_subb_co_u32": (set(), carry(True, False, True)),
    "v_subbrev_co_u32": (set(), carry(True, True, True)),
    "v_mad_u64_u32": (set(), mad_64),
    "v_readlane_b32": (set(), read_lane),
    "v_readfirstlane_b32": (set(), read_first_lane),
    "v_mbcnt_lo_u32_b32": (set(), count_bits_below(False)),
    "v_mbcnt_hi_u32_b32": (set(), count_bits_below(True)),
    "v_div_scale_f32": (set(), div_scale),
    "v_div_fmas_f32": (set(), div_fmas),
    "v_fma_mix_f32": ({"op_sel", "op_sel_hi"}, fma_mix),
    **{name: ({"op_sel", "op_sel_hi", "neg_lo", "neg_hi"}, packed) for name in PACKED},
}


class Barrier:
    """The wave arrived at a barrier and waits."""


class End:
    """The wave is done."""


class Branch:
    """A conditional branch on which the waves of the batch disagree."""

    def __init__(self, taken: Array, target: int) -> None:
        self.taken, self.target = taken, target


BARRIER, END = Barrier(), End()


def decode_kernel(kernel: Kernel, context: Context) -> list[Step]:
    """One closure per instruction. A closure returns None, a jump target, or one of the control objects."""
    return [_decode(instruction, kernel, context) for instruction in kernel.instructions]


def _decode(instruction: Instruction, kernel: Kernel, context: Context) -> Step:
    try:
        step = _control(instruction, kernel) or _compute(instruction, kernel, context)
        if step is None:
            raise UnknownInstruction(f"instruction {instruction.opcode} is not modelled")
        return step
    except MachineError as error:
        error.where = error.where or f"{kernel.name}, line {instruction.line}: {instruction.text}"
        raise
    except (ValueError, IndexError, KeyError) as error:
        raise UnknownInstruction(
            f"the operands of {instruction.opcode} are not modelled ({error})",
            where=f"{kernel.name}, line {instruction.line}: {instruction.text}",
        ) from error


def _compute(instruction: Instruction, kernel: Kernel, context: Context) -> Step | None:
    """Ask each module for the closure of an instruction; None where it has none of that name."""
    opcode, operands = instruction.opcode, [parse_operand(text, kernel) for text in instruction.operands]
    if opcode.startswith("s_"):
        return decode_smem(instruction, operands, context) or decode_salu(instruction, operands)
    if opcode.startswith("ds_"):
        return decode_ds(instruction, operands, context)
    if not opcode.startswith("v_"):
        return decode_vmem(instruction, operands, context)
    if opcode in _VECTOR:
        modifiers, decode = _VECTOR[opcode]
        check_modifiers(instruction, modifiers)
        return decode(instruction, operands)
    return mfma(instruction, operands) or compare(instruction, operands) or plain(instruction, operands)


def _control(instruction: Instruction, kernel: Kernel) -> Step | None:
    opcode = instruction.opcode
    if opcode in _NO_EFFECT:
        return lambda w: None
    if opcode == "s_endpgm":
        return lambda w: END
    if opcode == "s_barrier":
        return lambda w: BARRIER
    if opcode == "s_waitcnt":
        return _wait(instruction)
    if opcode in ("s_setreg_imm32_b32", "s_setreg_b32", "s_getreg_b32"):
        return None  # changes of the rounding or denormal mode would change results
    if opcode == "s_branch":
        target = _label(instruction, kernel)
        return lambda w: target
    condition = branch_condition(opcode)
    return _conditional(condition, _label(instruction, kernel)) if condition else None


def _label(instruction: Instruction, kernel: Kernel) -> int:
    name = instruction.operands[0]
    if name not in kernel.labels:
        raise UnknownInstruction(f"branch to the unknown label {name}")
    return kernel.labels[name]


def _conditional(condition: Callable[[Waves], Array], target: int) -> Step:
    def step(w: Waves) -> object:
        taken = condition(w)
        if taken.all():
            return target
        return Branch(np.asarray(taken), target) if taken.any() else None

    return step


def _wait(instruction: Instruction) -> Step:
    counts = dict(re.findall(r"(vmcnt|lgkmcnt)\((\d+)\)", instruction.text))
    vm, lgkm = (int(counts[name]) if name in counts else None for name in ("vmcnt", "lgkmcnt"))

    def step(w: Waves) -> None:
        finished = w.queues.retire_vm(vm) if vm is not None else []
        if lgkm is not None:
            finished = finished + w.queues.retire_lgkm(lgkm)
        w.retire(finished)

    return step

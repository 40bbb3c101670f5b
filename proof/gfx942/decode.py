"""From a parsed kernel to closures: each instruction is decoded once and then run for batches of waves."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .compare import decode_compare
from .context import Context
from .division import decode_division
from .ds import decode_ds
from .errors import MachineError, UnknownInstruction
from .lane_access import decode_lane_access
from .mfma import decode_mfma
from .mix import decode_mix
from .packed import decode_packed
from .parser import Instruction, Kernel
from .salu import branch_condition, decode_salu
from .smem import decode_smem
from .state import Array, Step, Waves
from .valu import decode_valu
from .vmem import decode_vmem

# Instructions that change no state that the interpreter models: timing and priorities.
_NO_EFFECT = {"s_nop", "s_sleep", "s_setprio"}


class Barrier:
    """The wave arrived at a barrier and waits."""


class End:
    """The wave is done."""


class Branch:
    """A conditional branch on which the waves of the batch disagree."""

    def __init__(self, taken: Array, target: int) -> None:
        self.taken = taken
        self.target = target


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
    opcode = instruction.opcode
    if opcode.startswith("s_"):
        return decode_smem(instruction, kernel, context) or decode_salu(instruction, kernel)
    if opcode.startswith("ds_"):
        return decode_ds(instruction, kernel, context)
    if opcode.startswith("v_"):
        return (
            decode_mfma(instruction, kernel)
            or decode_packed(instruction, kernel)
            or decode_mix(instruction, kernel)
            or decode_compare(instruction, kernel)
            or decode_lane_access(instruction, kernel)
            or decode_division(instruction, kernel)
            or decode_valu(instruction, kernel)
        )
    return decode_vmem(instruction, kernel, context)


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

"""Launching a kernel: workgroups in chunks, waves under a chosen order, barriers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import cast

import numpy as np

from .context import Context
from .decode import BARRIER, END, Branch, Step, decode_kernel
from .errors import MachineError
from .global_memory import Buffer, Memory
from .kernarg import Argument, kernarg_bytes
from .lds import Lds
from .parser import Kernel
from .schedule import Order, Scheduler
from .state import LANES, Rows, Waves

Grid = Sequence[int]
MAX_LDS = 65536


class Gfx942Device:
    """One device with `memory`. `lockstep_rows` bounds how many waves run as one batch."""

    def __init__(self, memory: Memory, lockstep_rows: int = 512) -> None:
        self.memory, self.lockstep_rows = memory, lockstep_rows

    def launch(
        self,
        kernel: Kernel,
        grid: Grid,
        block: Grid,
        args: Sequence[Argument] | bytes,
        *,
        order: Order = "lockstep",
        lds_bytes: int = 0,
        redundant_writes: bool = False,
        max_steps: int = 10_000_000,
    ) -> Counter[str]:
        """Run `grid` workgroups of `block` threads; return the executed instructions by opcode, of all waves.

        args: one value for each kernel argument: a Buffer, an int, a float or raw bytes; or, in one piece, the
        bytes that a host hands to a driver.
        order: "lockstep" (fast), "roundrobin", "forward" and "reverse" (each wave runs to its barrier), or a
        `random.Random` that picks the next wave before every instruction.
        lds_bytes: dynamic LDS beside the kernel's static size.
        redundant_writes: two waves (LDS) or workgroups (global memory) may write the same value to the same byte.
        """
        threads = int(np.prod(block))
        self._check_launch(kernel, block, threads, lds_bytes)
        context, steps = _decoded(kernel)
        context.begin(self.memory)
        kernarg = self.memory.add(kernarg_bytes(kernel, args), f"{kernel.name} kernarg")
        self.memory.begin_launch(redundant_writes)
        run = _Run(kernel, steps, context, order, max_steps)
        per_group = -(-threads // LANES)
        chunk = max(1, self.lockstep_rows // per_group)
        groups = int(np.prod(grid))
        try:
            with np.errstate(all="ignore"):
                for first in range(0, groups, chunk):
                    ids = np.arange(first, min(groups, first + chunk))
                    waves = _start(kernel, ids, grid, block, kernarg)
                    run.chunk(ids, waves, kernel.lds_bytes + lds_bytes, redundant_writes)
        finally:
            self.memory.end_launch()
            self.memory.release(kernarg)
        counts: Counter[str] = Counter()
        for instruction, number in zip(kernel.instructions, run.executed, strict=True):
            counts[instruction.opcode] += number
        return +counts

    @staticmethod
    def _check_launch(kernel: Kernel, block: Grid, threads: int, lds_bytes: int) -> None:
        required = kernel.workgroup
        if required and tuple(block) != required:
            raise MachineError(f"{kernel.name} requires workgroups of {required}, not {tuple(block)}")
        if not 1 <= threads <= 1024:
            raise MachineError(f"a workgroup of {threads} threads", expected="1 to 1024")
        if kernel.lds_bytes + lds_bytes > MAX_LDS:
            raise MachineError(f"{kernel.lds_bytes + lds_bytes} bytes of LDS", expected=f"at most {MAX_LDS} on gfx942")


def _decoded(kernel: Kernel) -> tuple[Context, list[Step]]:
    """The kernel's closures, decoded at its first launch, and the context they refer to."""
    if kernel.decoded is None:
        context = Context()
        kernel.decoded = (context, decode_kernel(kernel, context))
    return cast("tuple[Context, list[Step]]", kernel.decoded)


def _start(kernel: Kernel, ids: np.ndarray, grid: Grid, block: Grid, kernarg: Buffer) -> Waves:
    """All waves of the workgroups `ids` with the registers that the hardware initialises (CDNA3 ISA 3.13)."""
    threads = int(np.prod(block))
    per_group = -(-threads // LANES)
    slot, wave = np.repeat(np.arange(len(ids)), per_group), np.tile(np.arange(per_group), len(ids))
    waves = Waves.create(Rows(slot, wave), kernel.vgprs + kernel.agprs)
    thread = wave[:, None] * LANES + np.arange(LANES)
    active = thread < threads
    words = np.packbits(active, axis=-1, bitorder="little").view(np.uint32)
    waves.write_scalar_words(126, [words[:, 0], words[:, 1]])
    dims = [*block, 1, 1, 1][:3]
    x, y, z = thread % dims[0], thread // dims[0] % dims[1], thread // (dims[0] * dims[1])
    waves.write_vector(0, waves.u32, (x | (y << 10) | (z << 20)).astype(np.uint32))
    _initial_scalars(kernel, waves, ids[slot], [*grid, 1, 1, 1][:3], kernarg)
    return waves


def _initial_scalars(kernel: Kernel, waves: Waves, group: np.ndarray, grid: list[int], kernarg: Buffer) -> None:
    """User scalar registers in the order of the descriptor's enable bits, then the workgroup numbers."""
    enabled = kernel.descriptor.get
    for name in ("dispatch_ptr", "queue_ptr", "dispatch_id", "private_segment_size", "flat_scratch_init"):
        if enabled(f"user_sgpr_{name}", 0):
            raise MachineError(f"user_sgpr_{name} is not modelled", where=kernel.name)
    at = 0
    if enabled("user_sgpr_kernarg_segment_ptr", 0):
        address = np.full(waves.count, kernarg.address, np.uint64)
        waves.write_scalar64(0, address)
        at = 2
    # Preloaded arguments: the kernel's own prologue loads the same registers, so they stay unwritten here.
    at = max(at, enabled("user_sgpr_count", at))
    x, y, z = group % grid[0], group // grid[0] % grid[1], group // (grid[0] * grid[1])
    for axis, value in (("x", x), ("y", y), ("z", z)):
        if enabled(f"system_sgpr_workgroup_id_{axis}", int(axis == "x")):
            waves.write_scalar(at, value.astype(np.uint32))
            at += 1


class _Run:
    def __init__(self, kernel: Kernel, steps: list[Step], context: Context, order: Order, max_steps: int) -> None:
        self.kernel, self.steps, self.context, self.order, self.steps_left = kernel, steps, context, order, max_steps
        self.executed = [0] * len(steps)

    def chunk(self, ids: np.ndarray, waves: Waves, lds_bytes: int, redundant_writes: bool) -> None:
        """Run the workgroups `ids` from their first to their last instruction."""
        self.context.group_ids = ids
        self.context.lds = Lds(len(ids), lds_bytes, redundant_writes)
        scheduler = Scheduler(self.order, waves)
        while batch := scheduler.next():
            running = self._run(batch, scheduler)
            if not running and scheduler.all_waiting():
                outstanding = [a for b in scheduler.batches for a in b.queues.outstanding_lds()]
                self.context.lds.barrier(outstanding)
                scheduler.release()

    def _run(self, w: Waves, scheduler: Scheduler) -> bool:
        """Run one batch for the scheduler's slice: one instruction, or to the next barrier, branch or end.

        Returns whether its waves can go on (they neither wait at a barrier nor ended).
        """
        steps, executed, single = self.steps, self.executed, scheduler.one_instruction
        try:
            while True:
                pc = w.pc
                outcome = steps[pc](w)
                executed[pc] += w.count
                self.steps_left -= 1
                if outcome is None:
                    w.pc = pc + 1
                elif isinstance(outcome, int):
                    w.pc = outcome
                elif outcome is BARRIER:
                    w.pc = pc + 1
                    w.at_barrier = True
                    return False
                elif outcome is END:
                    scheduler.replace(w, [])
                    return False
                elif isinstance(outcome, Branch):
                    self._split(w, outcome, scheduler)
                    return True
                if self.steps_left < 0:
                    raise MachineError("the kernel does not end", expected="fewer instructions than max_steps")
                if single:
                    return True
        except MachineError as error:
            error.where = error.where or self._where(w)
            raise
        except IndexError as error:
            if w.pc < len(steps):
                raise
            raise MachineError("execution runs past the end of the kernel", where=self.kernel.name) from error

    def _split(self, w: Waves, branch: Branch, scheduler: Scheduler) -> None:
        taken, stay = w.take(branch.taken), w.take(~branch.taken)
        taken.pc, stay.pc = branch.target, w.pc + 1
        scheduler.replace(w, [stay, taken])

    def _where(self, w: Waves) -> str:
        instruction = self.kernel.instructions[w.pc]
        groups = sorted({int(self.context.group_ids[g]) for g in w.rows.group})
        some = ", ".join(map(str, groups[:4])) + (", ..." if len(groups) > 4 else "")
        waves = ", ".join(str(n) for n in sorted({int(n) for n in w.rows.wave}))
        return f"{self.kernel.name}, line {instruction.line}: {instruction.text} (workgroups {some}; waves {waves})"

"""The registers of waves that share one program counter.

Waves are batched: every register is an array over the batch (`rows`), vector registers also over 64 lanes, so that
one NumPy operation executes an instruction for all of them. A batch splits when its waves disagree on a branch.

Each register carries a state: READY (every lane was written), PARTIAL (some lane or wave never was: look at the
mask), PENDING (a memory instruction writes it and was not waited for).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import MissingWait, OutOfBounds, UndefinedRead
from .waits import Outstanding, WaitQueues

Array = npt.NDArray[Any]
LANES = 64
READY, PARTIAL, PENDING = 0, 1, 2
VCC, M0, EXEC, NUM_SGPRS = 106, 124, 126, 128
_FULL = np.uint32(0xFFFFFFFF)


@dataclass
class Rows:
    """Waves of a batch by row: workgroup slot in the current chunk, and wave number in it."""

    group: npt.NDArray[np.int64]
    wave: npt.NDArray[np.int64]

    def take(self, index: Array) -> Rows:
        return Rows(self.group[index], self.wave[index])

    @staticmethod
    def join(parts: list[Rows]) -> Rows:
        return Rows(np.concatenate([p.group for p in parts]), np.concatenate([p.wave for p in parts]))


class Waves:
    """A batch of waves at the same program counter.

    vector: uint32 [registers, rows, 64]; scalar: uint32 [128, rows]; scc: bool [rows]; exec: bool [rows, 64].
    Accumulation register n is vector register `vgprs + n`.
    """

    def __init__(self, rows: Rows, vector: Array, vector_written: Array, scalar: Array, scalar_written: Array) -> None:
        self.rows, self.count, self.pc = rows, len(rows.wave), 0
        self.vector, self.vector_written, self.scalar, self.scalar_written = (
            vector,
            vector_written,
            scalar,
            scalar_written,
        )
        self.vector_state = bytearray(b"\x01" * len(vector))
        self.scalar_state = bytearray(b"\x01" * NUM_SGPRS)
        self.scc = np.zeros(self.count, bool)
        self.queues, self.at_barrier = WaitQueues(), False
        self._make_views()
        self.exec_changed()

    def _make_views(self) -> None:
        # Lists of per-register views: indexing a list is several times faster than indexing the big array.
        self.u32 = list(self.vector)
        self.i32 = list(self.vector.view(np.int32))
        self.f32 = list(self.vector.view(np.float32))
        self.s32 = list(self.scalar)

    @classmethod
    def create(cls, rows: Rows, registers: int) -> Waves:
        """A batch at its kernel's first instruction: nothing written, all lanes active."""
        n = len(rows.wave)
        return cls(
            rows,
            np.zeros((registers, n, LANES), np.uint32),
            np.zeros((registers, n, LANES), bool),
            np.zeros((NUM_SGPRS, n), np.uint32),
            np.zeros((NUM_SGPRS, n), bool),
        )

    # -- EXEC ---------------------------------------------------------------------------------------------------
    def exec_changed(self) -> None:
        """Refresh the lane mask after a write to EXEC."""
        low, high = self.s32[EXEC], self.s32[EXEC + 1]
        self.active: Any = None  # context.ActiveLanes, once a memory instruction has asked
        self.exec_full = bool((low == _FULL).all() and (high == _FULL).all())
        self.exec = self.lane_mask(EXEC)

    def lane_mask(self, register: int) -> npt.NDArray[np.bool_]:
        """The 64-bit scalar pair at `register` as a bool array [rows, 64]."""
        words = np.ascontiguousarray(self.scalar[register : register + 2].T)
        return np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little").view(bool)

    # -- scalar registers -----------------------------------------------------------------------------------------
    def check_scalar(self, register: int, count: int = 1) -> None:
        """Raise unless scalar registers [register, register + count) may be read."""
        for index in range(register, register + count):
            state = self.scalar_state[index]
            if state == PENDING:
                raise MissingWait(f"{scalar_name(index)} is read before the s_waitcnt for its load")
            if state == PARTIAL:
                if not self.scalar_written[index].all():
                    raise UndefinedRead(f"{scalar_name(index)} is read, but nothing was written to it")
                self.scalar_state[index] = READY

    def write_scalar(self, register: int, value: Array | int) -> None:
        self.write_scalar_words(register, [value])

    def write_scalar64(self, register: int, value: Array) -> None:
        """Write a scalar pair from uint64 [rows]."""
        self.write_scalar_words(register, [value & np.uint64(0xFFFFFFFF), value >> np.uint64(32)])

    def write_scalar_words(self, register: int, words: Sequence[Array | int]) -> None:
        for index, word in enumerate(words, register):
            if self.scalar_state[index] == PENDING:
                raise MissingWait(f"{scalar_name(index)} is overwritten while a load to it is outstanding")
            self.s32[index][...] = word
            self.scalar_state[index] = READY
        if register >= EXEC:
            self.exec_changed()

    def write_lane_mask(self, register: int, mask: Array) -> None:
        """Write a scalar pair from a bool array [rows, 64]; lanes outside EXEC give 0."""
        if not self.exec_full:
            mask = mask & self.exec
        elif mask.shape != (self.count, LANES):
            mask = np.broadcast_to(mask, (self.count, LANES))
        words = np.packbits(mask, axis=-1, bitorder="little").view(np.uint32)
        self.write_scalar_words(register, [words[:, 0], words[:, 1]])

    # -- vector registers -----------------------------------------------------------------------------------------
    def check_vector(self, register: int, count: int = 1, all_lanes: bool = False) -> None:
        """Raise unless vector registers [register, register + count) may be read in the active lanes."""
        for index in range(register, register + count):
            state = self.vector_state[index]
            if state == PENDING:
                raise MissingWait(f"vector register {index} is read before the s_waitcnt for its load")
            if state == PARTIAL:
                written = self.vector_written[index]
                if written.all():
                    self.vector_state[index] = READY
                elif all_lanes or not written[self.exec].all():
                    lanes = np.argwhere(~written & (self.exec | all_lanes))
                    row, lane = (int(n) for n in lanes[0])
                    raise UndefinedRead(
                        f"vector register {index} is read, but nothing was written to lane {lane} "
                        f"of wave {int(self.rows.wave[row])} ({len(lanes)} such lanes)"
                    )

    def check_lanes(self, register: int, lanes: Any) -> None:
        """Raise unless a vector register may be read in some lanes, active or not; `lanes` indexes [rows, 64]."""
        state = self.vector_state[register]
        if state == PENDING or (state == PARTIAL and not self.vector_written[register][lanes].all()):
            self.check_vector(register, all_lanes=True)

    def before_vector_write(self, register: int, count: int = 1) -> None:
        """Raise if a load to one of these registers is outstanding."""
        for index in range(register, register + count):
            if self.vector_state[index] == PENDING:
                raise MissingWait(f"vector register {index} is overwritten while a load to it is outstanding")

    def write_vector(self, register: int, views: list[Array], value: Array, mask: Array | None = None) -> None:
        """Write one vector register in the active lanes (and `mask`, if given).

        `views` is `u32`, `i32` or `f32`, whichever has the dtype of `value`.
        """
        if self.vector_state[register] == PENDING:
            self.before_vector_write(register)
        if self.exec_full and mask is None:
            views[register][...] = value
            self.vector_state[register] = READY
            return
        lanes = self.exec if mask is None else self.exec & mask
        np.copyto(views[register], value, where=lanes)
        if self.vector_state[register] != READY:
            self.vector_written[register] |= lanes

    def vector_load_issued(self, register: int, count: int) -> None:
        """Mark registers as the target of an outstanding load in the active lanes."""
        self.before_vector_write(register, count)
        for index in range(register, register + count):
            if self.exec_full or self.vector_state[index] == READY:
                self.vector_written[index] = True
            else:
                self.vector_written[index] |= self.exec
            self.vector_state[index] = PENDING

    def scalar_load_issued(self, register: int, count: int) -> None:
        """Mark scalar registers as the target of an outstanding load."""
        for index in range(register, register + count):
            self.scalar_written[index] = True
            self.scalar_state[index] = PENDING

    def retire(self, finished: list[Outstanding]) -> None:
        """Make the results of completed memory instructions readable."""
        for item in finished:
            for index in item.vector:
                self.vector_state[index] = PARTIAL  # the first read looks at the mask and may find it full
            for index in item.scalar:
                self.scalar_state[index] = READY

    # -- splitting and joining --------------------------------------------------------------------------------------
    def materialise(self) -> None:
        """Bring the written masks up to date with the READY states."""
        for index, state in enumerate(self.vector_state):
            if state == READY:
                self.vector_written[index] = True
        for index, state in enumerate(self.scalar_state):
            if state == READY:
                self.scalar_written[index] = True

    def take(self, index: Array) -> Waves:
        self.materialise()
        part = Waves(
            self.rows.take(index),
            self.vector[:, index],
            self.vector_written[:, index],
            self.scalar[:, index],
            self.scalar_written[:, index],
        )
        part.vector_state[:] = self.vector_state
        part.scalar_state[:] = self.scalar_state
        part.scc = self.scc[index]
        part.pc = self.pc
        part.at_barrier = self.at_barrier
        part.queues = self.queues.take(index)
        return part

    @staticmethod
    def join(parts: list[Waves]) -> Waves:
        for part in parts:
            part.materialise()
        joined = Waves(
            Rows.join([p.rows for p in parts]),
            np.concatenate([p.vector for p in parts], axis=1),
            np.concatenate([p.vector_written for p in parts], axis=1),
            np.concatenate([p.scalar for p in parts], axis=1),
            np.concatenate([p.scalar_written for p in parts], axis=1),
        )
        joined.vector_state[:] = bytes(max(states) for states in zip(*(p.vector_state for p in parts), strict=True))
        joined.scalar_state[:] = bytes(max(states) for states in zip(*(p.scalar_state for p in parts), strict=True))
        joined.scc = np.concatenate([p.scc for p in parts])
        joined.pc = parts[0].pc
        return joined


def scalar_name(register: int) -> str:
    special = {VCC: "vcc_lo", VCC + 1: "vcc_hi", M0: "m0", EXEC: "exec_lo", EXEC + 1: "exec_hi"}
    return special.get(register, f"s{register}")


def require_register(register: int, count: int, limit: int, kind: str) -> None:
    """Raise unless [register, register + count) lies within the `limit` allocated registers."""
    if register + count > limit:
        raise OutOfBounds(f"{kind}{register + count - 1} is used, but the kernel allocates {limit}")


Step = Callable[[Waves], object]  # an instruction, decoded

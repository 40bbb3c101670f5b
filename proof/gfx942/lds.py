"""LDS of the workgroups in flight: bytes, written flags and the race detector.

Between two barriers no byte may be touched by two waves of a workgroup if one of them writes. An access counts until
its wave has waited for it: one that is still outstanding at a barrier can happen after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .byte_store import ByteStore, Index
from .errors import DataRace, OutOfBounds, UndefinedRead
from .state import Array

_EACH_BYTE = np.uint64(0x0001000100010001)  # one wave mask for each byte of a word


@dataclass
class LdsAccess:
    """One LDS access of a batch: where, by which waves, and in which rows of the batch."""

    index: Index
    rows: npt.NDArray[np.int64]  # [n], the batch row of each access
    wave: npt.NDArray[np.int64]  # [n]
    write: bool

    def take(self, rows: Array) -> LdsAccess:
        """The part in the given batch rows."""
        chosen = np.flatnonzero(rows) if rows.dtype == bool else rows
        new_row = np.full(int(self.rows.max(initial=-1)) + 1, -1)
        new_row[chosen[chosen < len(new_row)]] = np.flatnonzero(chosen < len(new_row))
        keep = new_row[self.rows] >= 0
        at = self.index.at[:, keep]
        return LdsAccess(Index(self.index.aligned, at), new_row[self.rows[keep]], self.wave[keep], self.write)

    @cached_property
    def mine(self) -> Array:
        """The mask of each access's wave, for every byte of it."""
        bit = np.uint64(1) << self.wave.astype(np.uint64)
        return bit * _EACH_BYTE if self.index.aligned else bit.astype(np.uint16)


class WaveMasks:
    """For each LDS byte the set of waves (16 bits) that touched it in one way since the last barrier."""

    def __init__(self, size: int) -> None:
        self._bytes = np.zeros(size, np.uint16)
        self._words = self._bytes.view(np.uint64)
        self._used = False

    def clear(self) -> None:
        if self._used:
            self._bytes[:] = 0
            self._used = False

    def mark(self, access: LdsAccess) -> None:
        self._used = True
        masks, mine, at = self._words if access.index.aligned else self._bytes, access.mine, access.index.at
        for wave in np.flatnonzero(np.bincount(access.wave)):  # two of them may touch the same byte
            chosen = access.wave == wave
            masks[at[:, chosen]] |= mine[chosen]

    def others(self, access: LdsAccess) -> Array | None:
        """Mask (like access.index.at) of places whose sets hold other waves than the access's own; None if none do."""
        if not self._used:
            return None
        masks = (self._words if access.index.aligned else self._bytes).take(access.index.at)
        other = (masks & ~access.mine) != 0
        return other if other.any() else None

    def without_mine(self, access: LdsAccess) -> Array:
        """Mask of the places where some byte has waves in its set, but not the access's own."""
        masks = np.ascontiguousarray((self._words if access.index.aligned else self._bytes)[access.index.at])
        fields = masks.view(np.uint16).reshape(*masks.shape, -1)
        mine = np.uint16(1) << access.wave.astype(np.uint16)
        return ((fields != 0) & ((fields & mine[:, None]) == 0)).any(axis=-1)


class Lds:
    """`size` bytes for each of `groups` workgroups.

    redundant_writes: two waves may write the same value to the same byte (compilers let several waves compute a
    result that all of them need).
    """

    def __init__(self, groups: int, size: int, redundant_writes: bool = False) -> None:
        self.size = size
        self.stride = -(-size // 8) * 8
        self.redundant_writes = redundant_writes
        self.bytes = ByteStore(groups * self.stride)
        self._writers, self._readers, self._updaters = (WaveMasks(len(self.bytes.data)) for _ in range(3))

    def read(self, address: Array, size: int, group: Array, wave: Array, rows: Array) -> tuple[Array, LdsAccess]:
        """Read `size` bytes at each address [n]: uint32 [words, n]."""
        access = LdsAccess(self._index(address, size, group), rows, wave, write=False)
        if not self.bytes.all_written(access.index):
            raise UndefinedRead(
                f"an LDS read of {size} bytes at offset {self._unwritten(access.index)} that were not written"
            )
        written = self._writers.others(access)
        if written is not None and self.redundant_writes:
            written = self._writers.without_mine(access)  # who wrote the same value reads its own
        self._race(access, written, "reads", "wrote")
        self._race(access, self._updaters.others(access), "reads", "updated atomically")
        self._readers.mark(access)
        return self.bytes.gather(access.index), access

    def write(self, address: Array, words: Array, size: int, group: Array, wave: Array, rows: Array) -> LdsAccess:
        """Write words [words, n] at each address [n]."""
        access = LdsAccess(self._index(address, size, group), rows, wave, write=True)
        written, seen = self._writers.others(access), self._readers.others(access)
        if self.redundant_writes and (written is not None or seen is not None):
            changed = self.bytes.differs(access.index, words)
            written, seen = (None if where is None else where & changed for where in (written, seen))
        self._race(access, written, "writes", "wrote")
        self._race(access, seen, "writes", "read")
        self._race(access, self._updaters.others(access), "writes", "updated atomically")
        if not self.bytes.scatter(access.index, words):
            raise DataRace(f"one LDS write puts different values at {self._place(access.index)}")
        self._writers.mark(access)
        if written is None and not self.redundant_writes:  # also two waves in the same instruction of one batch
            self._race(access, self._writers.others(access), "writes", "wrote")
        return access

    def atomic(self, address: Array, group: Array, wave: Array, rows: Array) -> Array:
        """Check the targets of a 32-bit LDS atomic; their byte positions. Atomics race only with plain accesses."""
        index = self._index(address, 4, group)
        if not index.aligned:
            raise OutOfBounds("an LDS atomic is not aligned to 4 bytes")
        if not self.bytes.all_written(index):
            raise UndefinedRead(f"an LDS atomic at offset {self._unwritten(index)} updates unwritten bytes")
        access = LdsAccess(index, rows, wave, write=True)
        self._race(access, self._writers.others(access), "atomically updates", "wrote")
        self._race(access, self._readers.others(access), "atomically updates", "read")
        self._updaters.mark(access)
        return index.at[0] * 4

    def barrier(self, outstanding: list[LdsAccess]) -> None:
        """Forget the accesses before the barrier, except those that may still happen."""
        for masks in (self._writers, self._readers, self._updaters):
            masks.clear()
        for access in outstanding:
            (self._writers if access.write else self._readers).mark(access)

    # -- checks -------------------------------------------------------------------------------------------------------
    def _index(self, address: Array, size: int, group: Array) -> Index:
        offset = address.astype(np.int64)
        if len(offset) and (offset.min() < 0 or offset.max() + size > self.size):
            where = int(offset[(offset < 0) | (offset + size > self.size)][0])
            raise OutOfBounds(f"LDS access of {size} bytes at offset {where}, the workgroup has {self.size} bytes")
        return Index.of(offset + group * self.stride, size)

    def _race(self, access: LdsAccess, wrong: Array | None, verb: str, other: str) -> None:
        if wrong is None or not wrong.any():
            return
        wave = int(access.wave[int(np.argwhere(wrong)[0][1])])
        raise DataRace(
            f"wave {wave} {verb} LDS bytes at {self._place(access.index, wrong)} that another wave {other} since the "
            "last barrier"
        )

    def _place(self, index: Index, wrong: Array | None = None) -> str:
        at = index.at if wrong is None else index.at[wrong]
        return str(int(at.flat[0]) * (4 if index.aligned else 1) % max(self.stride, 1))

    def _unwritten(self, index: Index) -> str:
        written = (self.bytes.written.view(np.uint32) if index.aligned else self.bytes.written)[index.at]
        return self._place(index, written != (0x01010101 if index.aligned else 1))

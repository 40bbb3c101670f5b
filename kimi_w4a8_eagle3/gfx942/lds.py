"""LDS of the workgroups in flight: bytes, written flags and the race detector.

Between two barriers no byte may be touched by two waves of a workgroup if one of them writes. An access counts until
its wave has waited for it: one that is still outstanding at a barrier can happen after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .byte_store import ByteStore, Index
from .errors import MissingWait, OutOfBounds, UndefinedRead
from .state import Array

_SEVERAL = 255
_ONES = np.uint32(0x01010101)


@dataclass
class Access:
    """One LDS access of a batch: where, by which waves, and in which rows of the batch."""

    index: Index
    rows: npt.NDArray[np.int64]  # [n], the batch row of each access
    wave: npt.NDArray[np.int64]  # [n]
    write: bool
    dma: bool = False

    def take(self, rows: Array) -> Access:
        """The part in the given batch rows."""
        chosen = np.flatnonzero(rows) if rows.dtype == bool else rows
        new_row = np.full(int(self.rows.max(initial=-1)) + 1, -1)
        new_row[chosen[chosen < len(new_row)]] = np.flatnonzero(chosen < len(new_row))
        keep = new_row[self.rows] >= 0
        at = self.index.at[:, keep]
        return Access(Index(self.index.aligned, at), new_row[self.rows[keep]], self.wave[keep], self.write, self.dma)


class Lds:
    """`size` bytes for each of `groups` workgroups."""

    def __init__(self, groups: int, size: int, report: Callable[[str], None]) -> None:
        self.size = size
        self.stride = -(-size // 8) * 8
        self.report = report
        self.bytes = ByteStore(groups * self.stride)
        self._writer = np.zeros(len(self.bytes.data), np.uint8)  # wave + 1, since the last barrier
        self._readers = np.zeros(len(self.bytes.data), np.uint16)  # one bit a wave
        self._atomic = np.zeros(len(self.bytes.data), np.uint8)  # wave + 1, or SEVERAL
        self._dma = np.zeros(len(self.bytes.data), np.uint8)
        self._dma_outstanding = 0
        self._atomics_used = False

    def read(self, address: Array, size: int, group: Array, wave: Array, rows: Array) -> tuple[Array, Access]:
        """Read `size` bytes at each address [n]: uint32 [words, n]."""
        access = Access(self._index(address, size, group), rows, wave, write=False)
        if not self.bytes.all_written(access.index):
            raise UndefinedRead(f"an LDS read of {size} bytes at offset {self._unwritten(access.index)} nobody wrote")
        self._check_dma(access)
        self._check_writers(access, "reads")
        self._mark(access)
        return self.bytes.gather(access.index), access

    def write(
        self, address: Array, words: Array, size: int, group: Array, wave: Array, rows: Array, dma: bool = False
    ) -> Access:
        """Write words [words, n] at each address [n]."""
        access = Access(self._index(address, size, group), rows, wave, write=True, dma=dma)
        self._check_dma(access)
        self._check_writable(access)
        same = self.bytes.scatter(access.index, words)
        self._mark(access)
        if not same or self._overwritten(access):
            self.report(f"one LDS write puts different values, or two waves' values, at {self._place(access.index)}")
        if dma:
            self._bytes(self._dma, access.index)[access.index.at] = 0x01010101 if access.index.aligned else 1
            self._dma_outstanding += 1
        return access

    def atomic(self, address: Array, group: Array, wave: Array, rows: Array) -> Array:
        """Check the targets of a 32-bit LDS atomic; their byte positions. Atomics race only with plain accesses."""
        index = self._index(address, 4, group)
        if not index.aligned:
            raise OutOfBounds("an LDS atomic is not aligned to 4 bytes")
        if not self.bytes.all_written(index):
            raise UndefinedRead(f"an LDS atomic at offset {self._unwritten(index)} updates bytes that nobody wrote")
        access = Access(index, rows, wave, write=True)
        self._check_dma(access)
        self._check_writers(access, "atomically updates")
        self._check_readers(access)
        self._atomics_used = True
        words, mine = self._atomic.view(np.uint32), self._writer_values(access)
        several = np.uint32(_SEVERAL) * _ONES
        before = words[index.at]
        words[index.at] = np.where((before == 0) | (before == mine), mine, several)
        words[index.at[words[index.at] != mine]] = several  # two waves of one batch
        return index.at[0] * 4

    def retire(self, access: Access) -> None:
        """A direct-to-LDS load has landed."""
        if access.dma:
            self._bytes(self._dma, access.index)[access.index.at] = 0
            self._dma_outstanding -= 1

    def barrier(self, outstanding: list[Access]) -> None:
        """Forget the accesses before the barrier, except those that may still happen."""
        self._writer[:] = 0
        self._readers[:] = 0
        if self._atomics_used:
            self._atomic[:] = 0
            self._atomics_used = False
        for access in outstanding:
            self._mark(access)

    # -- checks -------------------------------------------------------------------------------------------------------
    def _index(self, address: Array, size: int, group: Array) -> Index:
        offset = address.astype(np.int64)
        bad = offset + size > self.size
        if bad.any():
            where = int(offset[bad][0])
            raise OutOfBounds(f"LDS access of {size} bytes at offset {where}, the workgroup has {self.size} bytes")
        return Index.of(offset + group * self.stride, size)

    @staticmethod
    def _bytes(array: Array, index: Index) -> Array:
        if not index.aligned:
            return array
        return array.view(np.uint32 if array.dtype == np.uint8 else np.uint64)

    def _writer_values(self, access: Access) -> Array:
        one = access.wave.astype(np.uint32) + np.uint32(1)
        return one * _ONES if access.index.aligned else one.astype(np.uint8)

    def _reader_bits(self, access: Access) -> Array:
        bit = np.uint64(1) << access.wave.astype(np.uint64)
        return bit * np.uint64(0x0001000100010001) if access.index.aligned else bit.astype(np.uint16)

    def _check_writers(self, access: Access, verb: str) -> None:
        mine = self._writer_values(access)
        writer = self._bytes(self._writer, access.index)[access.index.at]
        if writer.any():
            wrong = (writer != 0) & (writer != mine)
            if wrong.any():
                self._check_bytes(access, wrong, verb)
        if self._atomics_used and not verb.startswith("atomically"):
            updater = self._bytes(self._atomic, access.index)[access.index.at]
            wrong = (updater != 0) & (updater != mine)
            if wrong.any():
                place = self._place(access.index, wrong)
                self.report(f"a wave {verb} LDS bytes at {place} that another wave updated atomically")

    def _check_writable(self, access: Access) -> None:
        self._check_writers(access, "writes")
        self._check_readers(access)

    def _check_readers(self, access: Access) -> None:
        readers = self._bytes(self._readers, access.index)[access.index.at]
        if readers.any() and (readers & ~self._reader_bits(access)).any():
            wrong = (readers & ~self._reader_bits(access)) != 0
            column = int(np.argwhere(wrong)[0][1])
            self.report(
                f"wave {int(access.wave[column])} writes LDS bytes at {self._place(access.index, wrong)} that another "
                "wave read since the last barrier"
            )

    def _check_bytes(self, access: Access, wrong: Array, verb: str) -> None:
        """A word may hold bytes of which only some were written: look at each byte."""
        if access.index.aligned:
            at = access.index.at[wrong] * 4
            waves = np.broadcast_to(access.wave, wrong.shape)[wrong]
            found = self._writer[at[:, None] + np.arange(4)]
            if not ((found != 0) & (found != waves[:, None] + 1)).any():
                return
        column = int(np.argwhere(wrong)[0][1])
        self.report(
            f"wave {int(access.wave[column])} {verb} LDS bytes at {self._place(access.index, wrong)} that another wave "
            "wrote since the last barrier"
        )

    def _check_dma(self, access: Access) -> None:
        if not self._dma_outstanding:
            return
        flags = self._bytes(self._dma, access.index)[access.index.at]
        if flags.any():
            raise MissingWait(
                f"LDS bytes at {self._place(access.index, flags != 0)} are used before the s_waitcnt for the load that "
                "fills them"
            )

    def _mark(self, access: Access) -> None:
        if access.write:
            self._bytes(self._writer, access.index)[access.index.at] = self._writer_values(access)
            return
        readers, bits = self._bytes(self._readers, access.index), self._reader_bits(access)
        if len(access.wave) and (access.wave == access.wave[0]).all():
            readers[access.index.at] |= bits
        else:
            np.bitwise_or.at(readers, access.index.at, np.broadcast_to(bits, access.index.at.shape))

    def _overwritten(self, access: Access) -> bool:
        found = self._bytes(self._writer, access.index)[access.index.at]
        return bool((found != self._writer_values(access)).any())

    def _place(self, index: Index, wrong: Array | None = None) -> str:
        at = index.at if wrong is None else index.at[wrong]
        return str(int(at.flat[0]) * (4 if index.aligned else 1) % max(self.stride, 1))

    def _unwritten(self, index: Index) -> str:
        written = self._bytes(self.bytes.written, index)[index.at]
        return self._place(index, written != (0x01010101 if index.aligned else 1))

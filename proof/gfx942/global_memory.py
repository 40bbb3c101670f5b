"""The device's global memory: registered buffers in one address space, with guard gaps and written flags."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .byte_store import ByteStore, Index
from .errors import DataRace, OutOfBounds, UndefinedRead
from .state import Array

BASE = 0x20_0000_0000
_ALIGN, _GUARD = 256, 4096


@dataclass(frozen=True)
class Buffer:
    """A registered buffer: its device address, and how to read it back."""

    address: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    name: str


class Memory:
    """Buffers laid out one after another; every byte between them is unallocated.

    `add` copies an array in, `empty` reserves bytes that nobody wrote yet, `read` copies a result out.
    """

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self._end = _GUARD
        self._store = ByteStore(1 << 16)
        self._allocated = np.zeros(1 << 16, np.uint8)
        self._stored_by: npt.NDArray[np.int32] | None = None
        self._stored_range = (0, 0)
        self.report: Callable[[str], None] = _raise_race
        self._redundant_writes = False

    def add(self, array: npt.ArrayLike, name: str = "") -> Buffer:
        """Register a copy of `array`; all its bytes count as written."""
        values = np.ascontiguousarray(array)
        buffer = self.empty(values.shape, values.dtype, name)
        start = buffer.address - BASE
        self._store.data[start : start + buffer.nbytes] = values.reshape(-1).view(np.uint8)
        self._store.written[start : start + buffer.nbytes] = 1
        return buffer

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.uint8, name: str = "") -> Buffer:
        """Register a buffer that nobody has written."""
        dims = (shape,) if isinstance(shape, int) else tuple(shape)
        kind = np.dtype(dtype)
        nbytes = int(np.prod(dims, dtype=np.int64)) * kind.itemsize
        start = -(-self._end // _ALIGN) * _ALIGN
        self._end = start + nbytes + _GUARD
        self._grow(self._end)
        self._allocated[start : start + nbytes] = 1
        buffer = Buffer(BASE + start, nbytes, dims, kind, name or f"buffer{len(self.buffers)}")
        self.buffers.append(buffer)
        return buffer

    def read(self, buffer: Buffer, unwritten: int | None = None) -> npt.NDArray[np.generic]:
        """A copy of the buffer. Bytes that nobody wrote are an error, or get the value `unwritten`."""
        start = buffer.address - BASE
        data = self._store.data[start : start + buffer.nbytes].copy()
        missing = self._store.written[start : start + buffer.nbytes] == 0
        if missing.any():
            if unwritten is None:
                first = int(np.argmax(missing))
                raise UndefinedRead(f"{buffer.name}: {int(missing.sum())} bytes were never written, first {first}")
            data[missing] = unwritten
        return data.view(buffer.dtype).reshape(buffer.shape)

    def write(self, buffer: Buffer, array: npt.ArrayLike) -> None:
        """Overwrite a whole buffer from the host."""
        values = np.ascontiguousarray(array, dtype=buffer.dtype).reshape(buffer.shape)
        start = buffer.address - BASE
        self._store.data[start : start + buffer.nbytes] = values.reshape(-1).view(np.uint8)
        self._store.written[start : start + buffer.nbytes] = 1

    def release(self, buffer: Buffer) -> None:
        """Unregister the last buffer; its addresses become invalid."""
        start = buffer.address - BASE
        self._allocated[start : start + buffer.nbytes] = 0
        self._store.written[start : start + buffer.nbytes] = 0
        self.buffers.remove(buffer)
        self._end = max([_GUARD, *(b.address - BASE + b.nbytes + _GUARD for b in self.buffers)])

    def _grow(self, size: int) -> None:
        if size <= len(self._allocated):
            return
        old, self._store = self._store, ByteStore(2 * size)
        self._store.data[: len(old.data)] = old.data
        self._store.written[: len(old.written)] = old.written
        allocated = np.zeros(len(self._store.data), np.uint8)
        allocated[: len(self._allocated)] = self._allocated
        self._allocated = allocated

    # -- what the interpreter calls -----------------------------------------------------------------------------------
    def begin_launch(self, report: Callable[[str], None], redundant_writes: bool = False) -> None:
        """Start tracking which workgroup stores what."""
        self.report = report
        self._redundant_writes = redundant_writes
        self._stored_by = np.zeros(len(self._allocated), np.int32)
        self._stored_range = (len(self._allocated), 0)

    def load(self, address: Array, size: int, group: Array) -> Array:
        """Load `size` bytes at each address [n] for workgroups [n]: uint32 [words, n]."""
        index = self._index(address, size, "load")
        if not self._store.all_written(index):
            bad = self._first(address, size, lambda at: self._store.written[at] == 0)
            raise UndefinedRead(f"a load of {size} bytes at {self.where(bad)} reads bytes that nobody wrote")
        offset = address.astype(np.int64) - BASE
        low, high = self._stored_range
        if self._stored_by is not None and len(offset) and offset.max() + size > low and offset.min() < high:
            owner = self._stored_by[offset]
            if ((owner != 0) & (owner != group + 1)).any():
                self.report("a workgroup loads what another workgroup of the same launch stored")
        return self._store.gather(index)

    def store(self, address: Array, words: Array, size: int, group: Array) -> None:
        """Store words [words, n] at each address [n]."""
        index = self._index(address, size, "store")
        at = (address.astype(np.int64) - BASE)[None] + np.arange(size)[:, None]
        before = self._store.data[at] if self._redundant_writes else None
        if not self._store.scatter(index, words):
            self.report("two lanes of one store write different values to the same address")
        if self._stored_by is None or not len(address):
            return
        low, high = self._stored_range
        self._stored_range = (min(low, int(at.min())), max(high, int(at.max()) + 1))
        owner = self._stored_by[at]
        self._stored_by[at] = group + 1
        earlier = (owner != 0) & (owner != group + 1)
        together = self._stored_by[at] != group + 1  # in the same instruction of this batch
        conflict = earlier | together if before is None else earlier & (before != self._store.data[at])
        if conflict.any():
            self.report("two workgroups store to the same bytes")

    def update(self, address: Array, size: int) -> Array:
        """Check the targets of an atomic; the byte offsets into `raw`."""
        index = self._index(address, size, "atomic")
        if not self._store.all_written(index):
            bad = self._first(address, size, lambda at: self._store.written[at] == 0)
            raise UndefinedRead(f"an atomic at {self.where(bad)} updates bytes that nobody wrote")
        return address.astype(np.int64) - BASE

    @property
    def raw(self) -> npt.NDArray[np.uint8]:
        """All bytes, for atomics."""
        return self._store.data

    def _index(self, address: Array, size: int, what: str) -> Index:
        offset = address.astype(np.int64) - BASE
        inside = (offset >= 0) & (offset <= len(self._allocated) - size)
        if not inside.all():
            raise OutOfBounds(f"a {what} of {size} bytes at {self.where(int(address[~inside][0]))}")
        index = Index.of(offset, size)
        allocated = self._allocated.view(np.uint32) if index.aligned else self._allocated
        full = 0x01010101 if index.aligned else 1
        if not (allocated[index.at] == full).all():
            bad = self._first(address, size, lambda at: self._allocated[at] == 0)
            raise OutOfBounds(f"a {what} of {size} bytes at {self.where(bad)}")
        return index

    def _first(self, address: Array, size: int, wrong: Callable[[Array], Array]) -> int:
        at = (address.astype(np.int64) - BASE)[:, None] + np.arange(size)
        row = int(np.argmax(wrong(at).any(axis=1)))
        return int(address[row])

    def where(self, address: int) -> str:
        """An address in terms of the buffer it is in or after."""
        before = [b for b in self.buffers if b.address <= address]
        if not before:
            return f"address {address:#x} (before every buffer)"
        buffer = before[-1]
        return f"address {address:#x} = {buffer.name} + {address - buffer.address} (of {buffer.nbytes} bytes)"


def _raise_race(message: str) -> None:
    raise DataRace(message)

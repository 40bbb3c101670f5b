"""The device's global memory: registered buffers in one address space, with guard gaps and written flags.

A buffer is a copy that only launches change, or memory of this process (`share`): launches find and leave their bytes
there, at the addresses that the process has for them.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .byte_store import ByteStore, Index
from .errors import DataRace, OutOfBounds, UndefinedRead
from .state import Array

BASE = 0x20_0000_0000
_ALIGN, _GUARD = 256, 4096
_CAPACITY = 1 << 26  # bytes before the store grows; untouched ones take no memory


@dataclass(frozen=True)
class Buffer:
    """A registered buffer: its device address, and how to read it back."""

    address: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    name: str
    start: int  # in the store


class Memory:
    """Buffers laid out one after another; every byte between them is unallocated.

    `add` copies an array in, `empty` reserves unwritten bytes, `read` copies a result out; `share` makes
    an array of this process device memory.
    """

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self._shared: dict[Buffer, npt.NDArray[np.uint8]] = {}
        self._by_address: list[Buffer] = []  # during a launch
        self._end = _GUARD
        self._whole: set[Buffer] = set()  # of which every byte was written
        self._store = ByteStore(_CAPACITY)
        self._allocated = np.zeros(_CAPACITY, np.uint8)
        self._stored_by: npt.NDArray[np.int32] | None = None
        self._stored_range = (0, 0)
        self._redundant_writes = False

    def add(self, array: npt.ArrayLike, name: str = "") -> Buffer:
        """Register a copy of `array`; all its bytes count as written."""
        values = np.ascontiguousarray(array)
        buffer = self.empty(values.shape, values.dtype, name)
        self._store.data[self._bytes(buffer)] = values.reshape(-1).view(np.uint8)
        self.host_wrote(buffer)
        return buffer

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.uint8, name: str = "") -> Buffer:
        """Register an unwritten buffer."""
        return self._reserve((shape,) if isinstance(shape, int) else tuple(shape), np.dtype(dtype), name)

    def share(self, array: npt.NDArray[np.uint8], name: str = "", written: bool = True) -> Buffer:
        """Register memory of this process at its own address; `written`: whether its bytes may be read by now."""
        buffer = self._reserve(array.shape, array.dtype, name, array.ctypes.data)
        self._shared[buffer] = array
        if written:
            self.host_wrote(buffer)
        return buffer

    def host_wrote(self, buffer: Buffer) -> None:
        """The process has written all of a buffer."""
        self._store.written[self._bytes(buffer)] = 1
        self._whole.add(buffer)

    def _reserve(
        self, dims: tuple[int, ...], kind: np.dtype[np.generic], name: str, address: int | None = None
    ) -> Buffer:
        nbytes = int(np.prod(dims, dtype=np.int64)) * kind.itemsize
        start = -(-self._end // _ALIGN) * _ALIGN
        self._end = start + nbytes + _GUARD
        self._grow(self._end)
        self._allocated[start : start + nbytes] = 1
        place = BASE + start if address is None else address
        buffer = Buffer(place, nbytes, dims, kind, name or f"buffer{len(self.buffers)}", start)
        self.buffers.append(buffer)
        return buffer

    def read(self, buffer: Buffer, unwritten: int | None = None) -> npt.NDArray[np.generic]:
        """A copy of the buffer. Unwritten bytes are an error, or get the value `unwritten`."""
        data = self._store.data[self._bytes(buffer)].copy()
        missing = self._store.written[self._bytes(buffer)] == 0
        if missing.any():
            if unwritten is None:
                first = int(np.argmax(missing))
                raise UndefinedRead(f"{buffer.name}: {int(missing.sum())} bytes were never written, first {first}")
            data[missing] = unwritten
        return data.view(buffer.dtype).reshape(buffer.shape)

    @staticmethod
    def _bytes(buffer: Buffer) -> slice:
        return slice(buffer.start, buffer.start + buffer.nbytes)

    def release(self, buffer: Buffer) -> None:
        """Unregister the last buffer; its addresses become invalid."""
        self._allocated[self._bytes(buffer)] = 0
        self._store.written[self._bytes(buffer)] = 0
        self._whole.discard(buffer)
        self.buffers.remove(buffer)
        self._end = max([_GUARD, *(b.start + b.nbytes + _GUARD for b in self.buffers)])

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
    def begin_launch(self, redundant_writes: bool = False) -> None:
        """Take the shared bytes in, and start tracking which workgroup stores what."""
        for buffer, array in self._shared.items():
            self._store.data[self._bytes(buffer)] = array
        self._by_address = sorted(self.buffers, key=lambda b: b.address)
        self._redundant_writes = redundant_writes
        self._stored_by = np.zeros(-(-self._end // 4) * 4, np.int32)
        self._stored_range = (len(self._allocated), 0)

    def end_launch(self) -> None:
        """Give the shared bytes back."""
        for buffer, array in self._shared.items():
            array[...] = self._store.data[self._bytes(buffer)]
        self._by_address = []

    def load(self, address: Array, size: int, group: Array) -> Array:
        """Load `size` bytes at each address [n] for workgroups [n]: uint32 [words, n]."""
        offset, buffer = self._offset(address, size)
        index = self._index(address, offset, size, buffer, "load")
        if buffer not in self._whole and not self._store.all_written(index):
            bad = self._first(address, offset, size, self._store.written)
            raise UndefinedRead(f"a load of {size} bytes at {self.where(bad)} reads unwritten bytes")
        low, high = self._stored_range
        if self._stored_by is not None and len(offset) and offset.max() + size > low and offset.min() < high:
            owner = self._stored_by.take(offset)
            if ((owner != 0) & (owner != group + 1)).any():
                raise DataRace("a workgroup loads what another workgroup of the same launch stored")
        return self._store.gather(index)

    def store(self, address: Array, words: Array, size: int, group: Array) -> None:
        """Store words [words, n] at each address [n]."""
        offset, buffer = self._offset(address, size)
        index = self._index(address, offset, size, buffer, "store")
        unit = 4 if index.aligned else 1  # bytes to an index: what follows is [places, n, unit]
        data = self._store.data.reshape(-1, unit)
        before = data[index.at] if self._redundant_writes else None
        if not self._store.scatter(index, words):
            raise DataRace("two lanes of one store write different values to the same address")
        if self._stored_by is None or not len(address):
            return
        low, high = self._stored_range
        self._stored_range = (min(low, int(offset.min())), max(high, int(offset.max()) + size))
        owners, mine = self._stored_by.reshape(-1, unit), (group + 1).astype(np.int32)[:, None]
        owner = owners[index.at]
        owners[index.at] = mine
        earlier = (owner != 0) & (owner != mine)
        together = owners[index.at] != mine  # in the same instruction of this batch
        conflict = earlier | together if before is None else earlier & (before != data[index.at])
        if conflict.any():
            raise DataRace("two workgroups store to the same bytes")

    def _offset(self, address: Array, size: int) -> tuple[Array, Buffer | None]:
        """Offset in the store of the byte at each address; negative or past its end where there is none.

        And the buffer that all of these accesses lie within, if one is.
        """
        at = address.astype(np.int64)
        if len(at) and self._by_address:
            low, high = int(at.min()), int(at.max())
            buffer = self._by_address[max(0, bisect_right(self._by_address, low, key=lambda b: b.address) - 1)]
            if buffer.address <= low and high + size <= buffer.address + buffer.nbytes:
                return at - (buffer.address - buffer.start), buffer
        if not self._shared:
            return at - BASE, None
        offset = np.full(len(at), -1)
        for buffer in self._by_address:
            inside = (at >= buffer.address) & (at < buffer.address + buffer.nbytes)
            offset[inside] = at[inside] - (buffer.address - buffer.start)
        return offset, None

    def _index(self, address: Array, offset: Array, size: int, buffer: Buffer | None, what: str) -> Index:
        if buffer is not None:
            return Index.of(offset, size)
        inside = (offset >= 0) & (offset <= len(self._allocated) - size)
        if not inside.all():
            raise OutOfBounds(f"a {what} of {size} bytes at {self.where(int(address[~inside][0]))}")
        index = Index.of(offset, size)
        allocated = self._allocated.view(np.uint32) if index.aligned else self._allocated
        full = 0x01010101 if index.aligned else 1
        if not (allocated[index.at] == full).all():
            bad = self._first(address, offset, size, self._allocated)
            raise OutOfBounds(f"a {what} of {size} bytes at {self.where(bad)}")
        return index

    @staticmethod
    def _first(address: Array, offset: Array, size: int, flags: npt.NDArray[np.uint8]) -> int:
        """The first address with a byte whose flag is 0."""
        at = offset[:, None] + np.arange(size)
        return int(address[int(np.argmax((flags[at] == 0).any(axis=1)))])

    def where(self, address: int) -> str:
        """An address in terms of the buffer it is in or after."""
        before = [b for b in self.buffers if b.address <= address]
        if not before:
            return f"address {address:#x} (before every buffer)"
        buffer = max(before, key=lambda b: b.address)
        return f"address {address:#x} = {buffer.name} + {address - buffer.address} (of {buffer.nbytes} bytes)"

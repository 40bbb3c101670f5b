"""Bytes with a `written` flag each, gathered and scattered as little-endian 32-bit words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .state import Array


@dataclass(frozen=True)
class Index:
    """Positions of equally long accesses: word indices if all are aligned, byte indices otherwise.

    at: int64 [words or bytes, ...accesses]
    """

    aligned: bool
    at: npt.NDArray[np.int64]

    @staticmethod
    def of(offset: Array, size: int) -> Index:
        """Accesses of `size` bytes at byte `offset` (any shape)."""
        aligned = size % 4 == 0 and not (offset & 3).any()
        first = (offset >> 2) if aligned else offset
        count = size // 4 if aligned else size
        steps = np.arange(count, dtype=np.int64).reshape((count,) + (1,) * offset.ndim)
        return Index(bool(aligned), first[None] + steps)


class ByteStore:
    """`size` bytes (rounded up to a multiple of 8), none of them written."""

    def __init__(self, size: int) -> None:
        size = -(-size // 8) * 8
        self.data = np.zeros(size, np.uint8)
        self.written = np.zeros(size, np.uint8)

    def all_written(self, index: Index) -> bool:
        if index.aligned:
            return bool((self.written.view(np.uint32).take(index.at) == 0x01010101).all())
        return bool(self.written.take(index.at).all())

    def gather(self, index: Index) -> Array:
        """The accessed bytes as uint32 [words, ...]; an access of 1 or 2 bytes gives one zero-extended word."""
        if index.aligned:
            return self.data.view(np.uint32).take(index.at)
        return join_bytes(self.data.take(index.at))

    def differs(self, index: Index, words: Array) -> Array:
        """Mask (like index.at) of the places where storing words [words, ...] would change a value."""
        if index.aligned:
            return self.data.view(np.uint32)[index.at] != words
        return self.data[index.at] != split_bytes(words, len(index.at))

    def scatter(self, index: Index, words: Array) -> bool:
        """Store words [words, ...]; False if two accesses wrote different values to one place."""
        if index.aligned:
            store = self.data.view(np.uint32)
            store[index.at] = words
            self.written.view(np.uint32)[index.at] = 0x01010101
            return bool((store.take(index.at) == words).all())
        split = split_bytes(words, len(index.at))
        self.data[index.at] = split
        self.written[index.at] = 1
        return bool((self.data[index.at] == split).all())


def join_bytes(parts: Array) -> Array:
    """uint8 [n, ...] to uint32 [ceil(n/4), ...], little endian."""
    words = np.zeros((-(-len(parts) // 4), *parts.shape[1:]), np.uint32)
    for n, part in enumerate(parts):
        words[n // 4] |= part.astype(np.uint32) << np.uint32(8 * (n % 4))
    return words


def split_bytes(words: Array, count: int) -> Array:
    """uint32 [words, ...] to the first `count` bytes, uint8 [count, ...]."""
    return np.stack([(words[n // 4] >> np.uint32(8 * (n % 4))).astype(np.uint8) for n in range(count)])

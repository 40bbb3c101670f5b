"""Read-modify-write operations on global memory and LDS, lane after lane where addresses repeat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .numeric import bf16_to_f32, f32_to_bf16
from .state import Array


@dataclass(frozen=True)
class Atomic:
    """`size` bytes; `function(old, *data)` works on words [n] (or uint64 for size 8)."""

    size: int
    function: Callable[..., Array]


def _signed(choose: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    return lambda old, new: choose(old.view(np.int32), new.view(np.int32)).view(np.uint32)


def _halves(add: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    def function(old: Array, new: Array) -> Array:
        parts = [add((old >> s).astype(np.uint16), (new >> s).astype(np.uint16)) for s in (np.uint32(0), np.uint32(16))]
        return parts[0].astype(np.uint32) | (parts[1].astype(np.uint32) << np.uint32(16))

    return function


def _add_bf16(a: Array, b: Array) -> Array:
    return f32_to_bf16(bf16_to_f32(a) + bf16_to_f32(b))


def _add_f16(a: Array, b: Array) -> Array:
    return (a.view(np.float16) + b.view(np.float16)).view(np.uint16)


def _add_f32(a: Array, b: Array) -> Array:
    return (a.view(np.float32) + b.view(np.float32)).view(np.uint32)


ATOMICS = {
    "add": Atomic(4, lambda old, new: old + new),
    "sub": Atomic(4, lambda old, new: old - new),
    "and": Atomic(4, lambda old, new: old & new),
    "or": Atomic(4, lambda old, new: old | new),
    "xor": Atomic(4, lambda old, new: old ^ new),
    "swap": Atomic(4, lambda old, new: new.copy()),
    "umax": Atomic(4, np.maximum),
    "umin": Atomic(4, np.minimum),
    "smax": Atomic(4, _signed(np.maximum)),
    "smin": Atomic(4, _signed(np.minimum)),
    "cmpswap": Atomic(4, lambda old, new, expected: np.where(old == expected, new, old)),
    "add_f32": Atomic(4, _add_f32),
    "pk_add_f16": Atomic(4, _halves(_add_f16)),
    "pk_add_bf16": Atomic(4, _halves(_add_bf16)),
    "add_x2": Atomic(8, lambda old, new: old + new),
    "or_x2": Atomic(8, lambda old, new: old | new),
    "and_x2": Atomic(8, lambda old, new: old & new),
    "add_f64": Atomic(8, lambda old, new: (old.view(np.float64) + new.view(np.float64)).view(np.uint64)),
}


def apply_atomic(name: str, memory: npt.NDArray[np.uint8], offsets: Array, data: Array) -> Array:
    """Update memory at byte `offsets` [n] with words `data` [words, n]; the values before, uint32 [words, n].

    Lanes that hit the same address take turns, in lane order.
    """
    atomic = ATOMICS[name]
    kind: type[np.unsignedinteger] = np.uint64 if atomic.size == 8 else np.uint32
    cells = memory.view(kind)
    index = offsets // atomic.size
    if atomic.size == 8:
        operands = [data[0].astype(np.uint64) | (data[1].astype(np.uint64) << np.uint64(32))]
    else:
        operands = list(data)
    old: Array = np.zeros(len(index), kind)
    for turn in _turns(index):
        old[turn] = cells[index[turn]]
        cells[index[turn]] = atomic.function(old[turn], *(o[turn] for o in operands))
    if atomic.size == 4:
        return old[None]
    return np.stack([old.astype(np.uint32), (old >> np.uint64(32)).astype(np.uint32)])


def _turns(index: Array) -> list[Array]:
    """Groups of lanes with distinct addresses; the k-th lane of an address is in group k."""
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    starts = np.r_[True, ordered[1:] != ordered[:-1]] if len(ordered) else np.zeros(0, bool)
    first = np.maximum.accumulate(np.where(starts, np.arange(len(ordered)), 0))
    rank = np.arange(len(ordered)) - first
    return [order[rank == turn] for turn in range(int(rank.max(initial=-1)) + 1)]

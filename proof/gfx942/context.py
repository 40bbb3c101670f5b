"""State that memory instructions share: memory, and LDS of the workgroups in flight."""

from __future__ import annotations

import numpy as np

from .global_memory import Memory
from .lds import Lds
from .state import LANES, Array, Waves


class Context:
    """One launch at a time. `group_ids` are the linear workgroup numbers of the chunk in flight."""

    def __init__(self) -> None:
        self.begin(Memory())

    def begin(self, memory: Memory) -> None:
        """Forget the previous launch."""
        self.memory = memory
        self.lds = Lds(0, 0)
        self.group_ids: Array = np.zeros(0, np.int64)

    def active(self, w: Waves) -> ActiveLanes:
        """The active lanes of a batch, flattened."""
        if w.active is None:
            w.active = ActiveLanes(self, w)
        found: ActiveLanes = w.active
        return found


class ActiveLanes:
    """Per active lane: batch row, lane, wave, workgroup; and conversion of [rows, 64] arrays to and from that list."""

    def __init__(self, context: Context, w: Waves) -> None:
        self.full, self.mask = w.exec_full, w.exec
        self.shape = (w.count, LANES)
        if self.full:
            self.rows = np.repeat(np.arange(w.count), LANES)
            self.lanes = np.tile(np.arange(LANES), w.count)
        else:
            self.rows, self.lanes = np.nonzero(w.exec)
        self.wave = w.rows.wave[self.rows]
        self.slot = w.rows.group[self.rows]
        self.group = context.group_ids[self.slot] if len(context.group_ids) else self.slot
        self.count = len(self.rows)

    def pick(self, value: Array) -> Array:
        """Values [rows, 64] (or broadcastable) of the active lanes, [n]."""
        full = np.broadcast_to(value, self.shape)
        return full.reshape(-1) if self.full else full[self.mask]

    def put(self, target: Array, value: Array) -> None:
        """Write values [n] into [rows, 64]."""
        if self.full:
            target[...] = value.reshape(self.shape)
        else:
            target[self.mask] = value

"""In which order waves run. A kernel without races gives the same result under every order."""

from __future__ import annotations

import random

import numpy as np

from .errors import MachineError
from .state import Waves

Order = str | random.Random
ORDERS = ("lockstep", "roundrobin", "forward", "reverse")


class Scheduler:
    """The batches of one chunk of workgroups.

    Waves with the same number in different workgroups run as one batch (workgroups are independent); "lockstep" puts
    all waves into one. A batch splits where its waves disagree on a branch and is joined again at the next barrier.
    """

    def __init__(self, order: Order, waves: Waves) -> None:
        if isinstance(order, str) and order not in ORDERS:
            raise MachineError(f"unknown order {order!r}", expected=f"random.Random or one of {', '.join(ORDERS)}")
        self.order = order
        self.one_instruction = order == "roundrobin" or isinstance(order, random.Random)
        apart = (waves.take(waves.rows.wave == number) for number in np.unique(waves.rows.wave))
        self.batches = [waves] if order == "lockstep" else list(apart)
        self._turn = -1

    def next(self) -> Waves | None:
        """The batch to run next; None when every wave has ended."""
        if not self.batches:
            return None
        ready = [b for b in self.batches if not b.at_barrier]
        if not ready:  # only waves that wait are left: the caller releases them
            raise MachineError("every wave waits at a barrier that no wave can release")
        if isinstance(self.order, random.Random):
            return self.order.choice(ready)
        if self.order == "roundrobin":
            self._turn += 1
            return ready[self._turn % len(ready)]
        key = [int(b.rows.wave.min()) for b in ready]
        return ready[int(np.argmax(key))] if self.order == "reverse" else ready[int(np.argmin(key))]

    def all_waiting(self) -> bool:
        """True if every wave that has not ended stands at a barrier."""
        return bool(self.batches) and all(b.at_barrier for b in self.batches)

    def release(self) -> None:
        """Let all waves pass their barrier, joining batches that stand at the same place."""
        for batch in self.batches:
            batch.at_barrier = False
        joined: list[Waves] = []
        groups: dict[tuple[int, int], list[Waves]] = {}
        for batch in self.batches:
            if not batch.queues.empty():
                joined.append(batch)
                continue
            wave = -1 if self.order == "lockstep" else int(batch.rows.wave[0])
            groups.setdefault((wave, batch.pc), []).append(batch)
        for parts in groups.values():
            joined.append(Waves.join(parts) if len(parts) > 1 else parts[0])
        self.batches = joined

    def replace(self, batch: Waves, parts: list[Waves]) -> None:
        """Put `parts` in the place of `batch`."""
        at = next(n for n, b in enumerate(self.batches) if b is batch)
        self.batches[at : at + 1] = parts

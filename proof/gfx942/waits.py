"""Outstanding memory instructions and what each `s_waitcnt` guarantees.

CDNA3 ISA, 4.4 "Manually inserted wait states" and the counters VM_CNT and LGKM_CNT: vector memory returns in the
order of issue; LDS instructions return in order among themselves; scalar loads return in any order, so that only a
count of zero says anything about them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(eq=False)
class Outstanding:
    """One issued memory instruction: the registers it will write, and the LDS bytes it touches."""

    kind: str  # "vm", "lds", "smem"
    vector: range = range(0)
    scalar: range = range(0)
    lds: list[Any] = field(default_factory=list)  # lds.LdsAccess, until the instruction is waited for; two of a read2

    def take(self, index: np.ndarray) -> Outstanding:
        return Outstanding(self.kind, self.vector, self.scalar, [access.take(index) for access in self.lds])


@dataclass
class WaitQueues:
    """The two in-order queues of one batch."""

    vm: list[Outstanding] = field(default_factory=list)
    lgkm: list[Outstanding] = field(default_factory=list)

    def empty(self) -> bool:
        return not self.vm and not self.lgkm

    def outstanding_lds(self) -> list[Any]:
        """LDS accesses that were issued but not waited for."""
        return [access for item in (*self.vm, *self.lgkm) for access in item.lds]

    def retire_vm(self, keep: int) -> list[Outstanding]:
        """Remove and return what is complete once at most `keep` vector memory instructions are outstanding."""
        done = self.vm[: max(0, len(self.vm) - keep)]
        self.vm = self.vm[len(done) :]
        return done

    def retire_lgkm(self, keep: int) -> list[Outstanding]:
        """Remove and return what is complete once at most `keep` LDS and scalar instructions are outstanding."""
        if keep == 0:
            done, self.lgkm = self.lgkm, []
            return done
        in_order = [item for item in self.lgkm if item.kind == "lds"]
        done = in_order[: max(0, len(in_order) - keep)]
        self.lgkm = [item for item in self.lgkm if item not in done]
        return done

    def take(self, index: np.ndarray) -> WaitQueues:
        return WaitQueues([item.take(index) for item in self.vm], [item.take(index) for item in self.lgkm])

"""Counts that decide a kernel's speed, read off its machine code: static, nothing runs.

`analyse(kernel)` gives the instruction mix of the whole kernel and of its hot region, registers, occupancy, weight
flow and bytes in flight.

The hot region is the loop with most MFMAs; in a kernel without such a loop it is the basic block with most MFMAs, from
its first weight load to its last MFMA.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from .costs import VALU, address_group, is_vector_load, kind, mfma_clocks, valu_clocks
from .flow import InFlight, WeightFlow, in_flight, renamed, weight_flow
from .parser import Instruction, Kernel

SIMD_REGISTERS, REGISTER_GRANULE, MAX_WAVES, SIMDS = 512, 8, 8, 4
LDS_PER_CU, LDS_GRANULE = 65536, 512


@dataclass(frozen=True)
class Mix:
    """Instruction counts of one stretch of code, one wave."""

    counts: Counter[str]  # by opcode
    kinds: Counter[str]  # of `costs.kind`

    @classmethod
    def of(cls, code: list[Instruction]) -> Mix:
        return cls(Counter(i.opcode for i in code), Counter(kind(i.opcode) for i in code))

    @property
    def mfma(self) -> int:
        return self.kinds["mfma"]

    @property
    def valu(self) -> int:
        """Vector ALU instructions without MFMA and accumulator moves."""
        return sum(self.kinds[name] for name in VALU)

    @property
    def mfma_clocks(self) -> int:
        return sum(n * mfma_clocks(op) for op, n in self.counts.items())

    def valu_clocks(self, quarter_rate_multiply: bool) -> int:
        return sum(n * valu_clocks(op, quarter_rate_multiply) for op, n in self.counts.items() if kind(op) in VALU)

    def ratio(self, quarter_rate_multiply: bool) -> float | None:
        """VALU clocks per MFMA clock. Above 0.75 the vector unit bounds the SIMD: an MFMA takes an issue slot too."""
        return self.valu_clocks(quarter_rate_multiply) / self.mfma_clocks if self.mfma_clocks else None

    def simd_bound(self, quarter_rate_multiply: bool) -> int:
        """Least clocks that one wave keeps its SIMD busy."""
        issue = self.valu_clocks(quarter_rate_multiply) + 4 * (self.kinds["accumulator move"] + self.mfma)
        return max(issue, self.mfma_clocks)


@dataclass(frozen=True)
class KernelStats:
    """All figures of one kernel."""

    name: str
    vgprs: int
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    scratch_bytes: int
    lds_bytes: int
    workgroup: int
    waves_per_simd: float
    whole: Mix
    hot: Mix
    hot_is_loop: bool
    flow: WeightFlow
    flight: InFlight


def analyse(kernel: Kernel, trips: int = 1, lds_bytes: int = 0) -> KernelStats:
    """Count `kernel`. trips: of the rolled hot loop in `whole`. lds_bytes: dynamic LDS."""
    code = kernel.instructions
    first, last, loop = _hot_region(kernel)
    block = renamed(code)[first:last]
    flow = weight_flow(block, loop)
    region = block if loop else _trim(block, flow.group)
    threads = _threads(kernel)
    lds = kernel.lds_bytes + lds_bytes
    waves, _ = occupancy(kernel.descriptor.get("next_free_vgpr", 0), lds, threads)
    meta = kernel.metadata.get
    repeated = code + block * (trips - 1) if loop else code
    return KernelStats(
        name=kernel.name,
        vgprs=_used(kernel, "vgpr"),
        agprs=_used(kernel, "agpr"),
        sgprs=_number(meta("sgpr_count")),
        vgpr_spills=_number(meta("vgpr_spill_count")),
        sgpr_spills=_number(meta("sgpr_spill_count")),
        scratch_bytes=kernel.scratch_bytes,
        lds_bytes=lds,
        workgroup=threads,
        waves_per_simd=waves,
        whole=Mix.of(repeated),
        hot=Mix.of(region),
        hot_is_loop=loop,
        flow=flow,
        flight=in_flight(region, loop, flow.group),
    )


def occupancy(registers: int, lds_bytes: int, threads: int) -> tuple[float, int]:
    """Waves per SIMD and workgroups per compute unit that registers (vector plus accumulation) and LDS allow."""
    allocated = max(REGISTER_GRANULE, math.ceil(registers / REGISTER_GRANULE) * REGISTER_GRANULE)
    per_group = math.ceil(threads / 64)
    groups = min(MAX_WAVES, SIMD_REGISTERS // allocated) * SIMDS // per_group
    if lds_bytes:
        groups = min(groups, LDS_PER_CU // (math.ceil(lds_bytes / LDS_GRANULE) * LDS_GRANULE))
    return min(MAX_WAVES, groups * per_group / SIMDS), groups


def _number(value: object) -> int:
    return int(value) if isinstance(value, int) else 0


def _used(kernel: Kernel, file: str) -> int:
    """Registers that the code names (the descriptor rounds and mixes both files)."""
    pattern = re.compile(rf"\b{file[0]}(?:(\d+)\b|\[\d+:(\d+)\])")
    names = (match for i in kernel.instructions for o in i.operands for match in pattern.findall(o))
    return max((int(one or last) + 1 for one, last in names), default=0)


def _threads(kernel: Kernel) -> int:
    if kernel.workgroup:
        return math.prod(kernel.workgroup)
    return _number(kernel.metadata.get("max_flat_workgroup_size")) or 256


def _hot_region(kernel: Kernel) -> tuple[int, int, bool]:
    """First and past-the-last instruction of the hot loop or block."""
    code = kernel.instructions
    mfma_before = [0]
    for instruction in code:
        mfma_before.append(mfma_before[-1] + (kind(instruction.opcode) == "mfma"))
    loops = [
        (kernel.labels[i.operands[0]], n + 1)
        for n, i in enumerate(code)
        if i.opcode.startswith(("s_cbranch", "s_branch")) and kernel.labels.get(i.operands[0], n + 1) <= n
    ]
    cuts = {0, len(code), *kernel.labels.values()}
    cuts |= {n + 1 for n, i in enumerate(code) if re.match(r"s_(cbranch|branch|endpgm|setpc)", i.opcode)}
    edges = sorted(cuts)
    blocks = list(pairwise(edges))

    def mfmas(span: tuple[int, int]) -> int:
        return mfma_before[span[1]] - mfma_before[span[0]]

    # Of nested loops the inner one counts: fewer instructions at the same number of MFMAs.
    best_loop = max(loops, key=lambda s: (mfmas(s), s[0] - s[1]), default=None)
    best_block = max(blocks, key=mfmas)
    if best_loop and mfmas(best_loop) and mfmas(best_loop) >= mfmas(best_block):
        return *best_loop, True
    return *best_block, False


def _trim(block: list[Instruction], group: str | None) -> list[Instruction]:
    mfmas = [n for n, i in enumerate(block) if kind(i.opcode) == "mfma"]
    if not mfmas:
        return block
    loads = (n for n, i in enumerate(block) if is_vector_load(i) and address_group(i) == group)
    return block[min(next(loads, mfmas[0]), mfmas[0]) : mfmas[-1] + 1]

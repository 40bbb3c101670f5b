"""Cost of the MoE kernels' machine code: figures of a kernel, comparison with a saved set, floors of a batch."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.files import write_atomic
from kimi_w4a8_eagle3.machine.hardware import SIMDS_PER_CU, Gpu
from kimi_w4a8_eagle3.moe.contract import MoeShape

from .account.blocks import expected_blocks
from .account.moe_time import INT8_TOPS_PER_CU
from .gfx942.parser import Kernel
from .gfx942.stats import KernelStats, analyse

BASELINE = Path(__file__).with_name("kernel_counts.json")
RARE = "; rare"  # `moe.flydsl.kernels.ops.RARE`, which needs FlyDSL
_LABEL = re.compile(r"^\S+:")
_BRANCH = re.compile(r"^\s+(s_branch|s_cbranch_\w+)\s+(\S+)")
_COPIES = {"v_mov_b64_e32", "v_mov_b32_e32", "s_branch"}
CLOCK_GHZ = 2.1  # MI300X and MI325X, peak engine clock

# Figures that may not grow, and figures that may not shrink, without a review noticing.
COSTS = (
    "valu_clocks", "mfma", "hot_ratio", "hot_multiplies", "unpack_per_8", "spilled_bytes", "exposed_waits",
    "lds_bytes",
)  # fmt: skip
GAINS = ("waves_per_simd", "weight_bytes_in_flight")

Figures = dict[str, float]


def common_path(text: str) -> str:
    """Return assembly without the blocks marked `ops.RARE`, which a tile of MXFP4 weights seldom needs.

    Blocks that are only reached through these go, too, and so do copies beside the products of rows that do not exist,
    and the branches that are left without a purpose.
    """
    if RARE not in text:
        return text
    blocks: list[list[str]] = [[]]
    for line in text.splitlines():
        if _LABEL.match(line) or (blocks[-1] and _BRANCH.match(blocks[-1][-1])):
            blocks.append([])
        blocks[-1].append(line)
    number = {found[0]: n for n, block in enumerate(blocks) if (found := _LABEL.match(block[0] if block else ""))}
    common, todo = set[int](), [0]
    while todo:
        if (n := todo.pop()) in common or n == len(blocks) or RARE in map(str.strip, blocks[n]):
            continue
        common.add(n)
        branch = _BRANCH.match(blocks[n][-1] if blocks[n] else "")
        todo += [number[f"{branch[2]}:"]] if branch else []
        todo += [n + 1] if branch is None or branch[1] != "s_branch" else []
    kept = list[str]()
    for n, block in enumerate(blocks):
        first = block[: bool(_LABEL.match(block[0] if block else ""))]
        work = {line.split()[0] for line in block[len(first) :] if line.strip()}
        kept += block if n in common and not (work and work <= _COPIES) else first
    return "\n".join(_straight(kept))


def _straight(lines: list[str]) -> list[str]:
    """Return lines without branches forward: a full block takes none of those that are left."""
    at = {label[0]: n for n, line in enumerate(lines) if (label := _LABEL.match(line))}
    back = {n: f"{branch[2]}:" for n, line in enumerate(lines) if (branch := _BRANCH.match(line))}
    back = {n: label for n, label in back.items() if at[label] < n}
    kept = (line for n, line in enumerate(lines) if n in back or not _BRANCH.match(line))
    return [line for line in kept if not line.startswith(".LBB") or line.split()[0] in back.values()]


def figures(kernel: Kernel, mfma_per_wave: int | None = None) -> Figures:
    """The figures of one wave; `mfma_per_wave`, where known, says how often the rolled loop runs."""
    stats = analyse(kernel)
    trips = 1
    if mfma_per_wave and stats.hot_is_loop:
        missing = mfma_per_wave - stats.whole.mfma
        trips = 1 + missing // stats.hot.mfma
        if missing < 0 or missing % stats.hot.mfma:
            raise KimiError(f"{kernel.name} has {stats.whole.mfma} MFMA, its tile needs {mfma_per_wave}")
    return _figures(analyse(kernel, trips))


def _figures(stats: KernelStats) -> Figures:
    whole, hot = stats.whole, stats.hot
    ratio = hot.ratio(quarter_rate_multiply=True)
    return {
        "mfma": whole.mfma,
        "mfma_clocks": whole.mfma_clocks,
        "valu": whole.valu,
        "valu_clocks": whole.valu_clocks(quarter_rate_multiply=True),
        "multiplies": whole.kinds["multiply"],
        "transcendentals": whole.kinds["transcendental"],
        "conversions": whole.kinds["conversion"],
        "simd_clocks": whole.simd_bound(quarter_rate_multiply=True),
        "hot_ratio": round(ratio, 3) if ratio is not None else 0.0,
        "hot_multiplies": hot.kinds["multiply"] if hot.mfma else 0,
        "unpack_per_8": round(stats.flow.unpack_per_word, 3) if hot.mfma else 0.0,
        "weight_bytes_in_flight": stats.flight.maximum if hot.mfma else 0,
        "weight_bytes_in_flight_mean": round(stats.flight.mean) if hot.mfma else 0,
        "exposed_waits": stats.flight.exposed_waits if hot.mfma else 0,
        "vgprs": stats.vgprs + stats.agprs,
        "sgprs": stats.sgprs,
        "spilled_bytes": stats.scratch_bytes,
        "lds_bytes": stats.lds_bytes,
        "waves_per_simd": stats.waves_per_simd,
        "waves": stats.workgroup // 64,
    }


def regressions(now: dict[str, Figures], before: dict[str, Figures]) -> list[str]:
    """One sentence for each figure that got worse, and for each kernel that is gone; better is not reported."""
    found = []
    for name, old in before.items():
        new = now.get(name)
        if new is None:
            found.append(f"{name}: no longer compiled")
            continue
        for key in (*COSTS, *GAINS):
            worse = new[key] > old[key] if key in COSTS else new[key] < old[key]
            if worse:
                found.append(f"{name}: {key} {old[key]:g} -> {new[key]:g}")
    return found


def read_figures(path: Path) -> dict[str, Figures]:
    """A file that `write_figures` made."""
    try:
        saved = json.loads(path.read_text())
        # Whole numbers stay whole, so that a file saved again differs only in the rows that changed.
        return {str(name): {key: value + 0 for key, value in row.items()} for name, row in saved.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise KimiError(
            "the saved kernel figures cannot be read",
            where=f"{path}: {error}",
            expected="python -m proof.kernels --save FILE",
        ) from error


def write_figures(rows: dict[str, Figures], path: Path) -> None:
    """Save figures, one kernel a line so that a review sees what changed."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    write_atomic(path, "{\n" + lines + "\n}\n")


@dataclass(frozen=True)
class KernelFloors:
    """Least microseconds of one stage for a batch with uniform routing, on an otherwise perfect GPU."""

    weights_us: float  # every distinct expert's weights read once from memory
    mfma_us: float  # rows as they are
    padded_mfma_us: float  # rows padded to what the code multiplies
    simd_us: float  # the code's own vector and matrix instructions, spread evenly over all SIMDs


def floors(
    gpu: Gpu, shape: MoeShape, tokens: int, stage: int, tile: tuple[int, int], wave: Figures, padded_to: int = 0
) -> KernelFloors:
    """Floors of stage 1 or 2 with (tile_m, tile_n); `wave` holds the figures of its kernel for a full block.

    padded_to: rows of a block are multiplied in multiples of so many, if not all.
    """
    tile_m, tile_n = tile
    weights = shape.hidden * shape.inter * (3 - stage)  # one expert's: gate and up, or down
    experts, _ = expected_blocks(shape, tokens, tile_m)
    padded_to = padded_to or tile_m
    padded = expected_blocks(shape, tokens, padded_to)[1] * padded_to
    peak = INT8_TOPS_PER_CU * gpu.compute_units * 1e12
    workgroups = padded / tile_m * ((shape.inter if stage == 1 else shape.hidden) / tile_n)
    simd_seconds = workgroups * wave["waves"] * wave["simd_clocks"] / (gpu.compute_units * SIMDS_PER_CU)
    return KernelFloors(
        weights_us=experts * weights / 2 / (gpu.hbm_tb_s * 1e12) * 1e6,
        mfma_us=2 * tokens * shape.top_k * weights / peak * 1e6,
        padded_mfma_us=2 * padded * weights / peak * 1e6,
        simd_us=simd_seconds / (CLOCK_GHZ * 1e9) * 1e6,
    )

"""Compile-time parameters and grids of the kernels; needs neither FlyDSL nor Triton.

A configuration names its kernel: its `repr` is the kernel's key in the manifest of the code objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ...base.errors import KimiError
from ...gates import PREFILL_ROWS, STAGE1_TILES, STAGE2_TILES
from ...quark.weight_format import INT4, WeightFormat
from .layout import CHUNK_K, LOW_K_BIT, PAIR, TILE_N

WAVES = 4
ROW_REGISTER_BYTES = 16 * 1024  # one wave's activations in stage 2, if several row tiles: 64 vector registers
QUANTIZED_BYTES = 20 * 1024  # LDS for the rows that stage 2 quantizes: three workgroups fit
W4A16_TILES = 2  # 16-channel tiles of a wave of the baseline
REDUCED = 512  # columns that a wave of the reduction takes
XCDS = 8  # dies of MI300X and MI325X, each with an L2 cache; workgroups go round them by their number
SORTERS = 8  # workgroups that sort the slots
OWN_ROWS, OWN_SLOTS = 4, 512  # where stage 1 sorts: rows of a workgroup, most slots of a batch
OWN_TILES = ((OWN_ROWS, 16, 256), (OWN_ROWS, 32, 256))
TOGETHER = 2  # 16-row tiles of prefill that are multiplied together, or skipped where a block has no such rows
LDS_BYTES = 65536


@dataclass(frozen=True)
class FlydslTiles:
    """One tile choice: rows a block and (n, k) of both stages; by_token: stage 2 adds a token's slots itself.

    With blocks of OWN_ROWS rows stage 1 sorts and quantizes. This holds for batches of at most OWN_SLOTS slots.
    """

    tile_m: int
    stage1: tuple[int, int]
    stage2: tuple[int, int]
    by_token: bool = False

    @classmethod
    def from_row(cls, tiles: dict[str, Any]) -> FlydslTiles:
        """Read the `tiles` of a table row: {"tile_m", "stage1": [n, k], "stage2": [n, k], "by_token" (optional)}."""
        try:
            (n1, k1), (n2, k2) = tiles["stage1"], tiles["stage2"]
            return cls(int(tiles["tile_m"]), (int(n1), int(k1)), (int(n2), int(k2)), bool(tiles.get("by_token")))
        except (KeyError, TypeError, ValueError) as error:
            raise KimiError(f"a FlyDSL row of the tile table is malformed: {error!r}", where=str(tiles)) from error

    def to_row(self) -> dict[str, Any]:
        """Return the `tiles` of a table row, the inverse of `from_row`."""
        row = {"tile_m": self.tile_m, "stage1": list(self.stage1), "stage2": list(self.stage2)}
        return {**row, "by_token": True} if self.by_token else row


class KernelConfig(Protocol):
    """Interface of every configuration below."""

    @property
    def hints(self) -> dict[str, int]:
        """Hints for the compiler's backend."""
        return {}

    def grid(self, count: Any) -> tuple[int, int, int]:
        """Return the workgroups for `count` row blocks, rows or tokens, or (these, columns) for part of the columns."""
        ...

    def problem(self) -> str | None:
        """Return the reason why no kernel can be built for these sizes, or None."""
        ...


@dataclass(frozen=True)
class _StageConfig(KernelConfig):
    """Compile-time parameters of both stages.

    tile_m: rows a workgroup.
    pinned: keep the written order of loads (else the compiler's).
    by_xcd: in prefill, neighbours in the list of work run on one XCD (`block.work_of`).
    """

    hidden: int
    inter: int
    top_k: int
    tile_m: int = 16
    tile_n: int = 64
    tile_k: int = 256
    pinned: bool = True
    by_xcd: bool = False


@dataclass(frozen=True)
class Stage1Config(_StageConfig):
    """Compile-time parameters of stage 1.

    tile_n: intermediate channels a workgroup (as many gate and up rows of w13).
    tile_k: k a wave covers in one turn of its loop (decode) or k of one LDS tile (prefill).
    experts: 0, or the number of experts with tile_m OWN_ROWS. Stage 1 then takes bfloat16 tokens and expert ids, and
        finds, quantizes and lists its rows itself (stage1_small.py).
    """

    experts: int = 0
    weights: WeightFormat = INT4

    @property
    def row_tiles(self) -> int:
        """16-row tiles of a workgroup."""
        return max(self.tile_m // 16, 1)

    @property
    def decode(self) -> bool:
        """True if the waves split K (decode), false if they split the tile (prefill)."""
        return self.tile_m < PREFILL_ROWS

    @property
    def hints(self) -> dict[str, int]:
        """Compiler hints that limit load-ahead: without them registers allow only two waves a SIMD."""
        far_ahead = not self.pinned and (self.tile_m, self.tile_n) == (16, 64)
        return {"waves_per_eu": 3} if far_ahead else {}

    def grid(self, blocks: int) -> tuple[int, int, int]:
        return self.inter // self.tile_n, blocks, 1

    def problem(self) -> str | None:
        tile = (self.tile_m, self.tile_n, self.tile_k)
        if tile not in (OWN_TILES if self.experts else STAGE1_TILES):
            return f"stage 1 has no kernel for tile (m, n, k) {tile}; it has {', '.join(map(str, STAGE1_TILES))}"
        if self.hidden % CHUNK_K:
            return f"hidden size {self.hidden} is not a multiple of {CHUNK_K} (stage 1)"
        if self.experts and self.hidden > 12288:
            return f"{OWN_ROWS} rows of {self.hidden} do not fit LDS (stage 1 for few tokens)"
        if self.inter % self.tile_n:
            return f"intermediate size {self.inter} is not a multiple of stage 1 tile_n {self.tile_n}"
        return None


@dataclass(frozen=True)
class Stage2Config(_StageConfig):
    """Compile-time parameters of stage 2.

    Rows are stage 1's float32, and each workgroup quantizes those of its block. The first workgroup of a block writes
    the row info that the reduction takes; in prefill it also writes the rows, for the launches of other columns.
    tile_n: output channels a workgroup.
    tile_k: k of one slot of the weight ring.
    short: blocks have up to OWN_ROWS rows, as stage 1 lists them for few tokens.
    """

    tile_n: int = 256
    short: bool = False
    weights: WeightFormat = INT4

    @property
    def row_tiles(self) -> int:
        """16-row tiles that a wave keeps in registers."""
        return min(self.tile_m // 16, max(ROW_REGISTER_BYTES // (16 * self.inter), 1))

    @property
    def keeps(self) -> bool:
        """True if the launch for column 0 quantizes the rows for the other launches."""
        return self.tile_m >= PREFILL_ROWS

    @property
    def row_bytes(self) -> int:
        """LDS bytes of a quantized row and its low sum; consecutive rows start in different banks."""
        return self.inter + 16

    @property
    def quantized_tiles(self) -> int:
        """Row tiles of each of `waves_m` waves that are in LDS at a time; more would reduce the waves a SIMD."""
        at_once = QUANTIZED_BYTES // (16 * self.waves_m * self.row_bytes)
        return next(n for n in (self.row_tiles, 2, 1) if n <= max(at_once, 1) and self.row_tiles % n == 0)

    @property
    def lds_bytes(self) -> int:
        """LDS bytes of the rows that are quantized at a time."""
        return (OWN_ROWS if self.short else 16 * self.waves_m * self.quantized_tiles) * self.row_bytes

    @property
    def waves_m(self) -> int:
        """Waves side by side over rows; the others share the columns."""
        return self.tile_m // 16 // self.row_tiles

    @property
    def tiles(self) -> int:
        """16-channel tiles that a wave computes."""
        return self.tile_n // TILE_N * self.waves_m // WAVES

    def grid(self, count: tuple[int, int]) -> tuple[int, int, int]:
        """Return the workgroups for `count`, (row blocks, columns)."""
        blocks, columns = count
        if self.by_xcd:  # x counts the blocks: a multiple of XCDS keeps a block's columns on its XCD
            return -(-blocks // XCDS) * XCDS, columns // self.tile_n, 1
        return columns // self.tile_n, blocks, 1

    def problem(self) -> str | None:
        if self.inter % CHUNK_K or not CHUNK_K <= self.inter <= 2048:
            return f"intermediate size {self.inter}: stage 2 takes multiples of {CHUNK_K} up to 2048"
        if self.tile_m not in STAGE2_TILES["M"] or self.tile_m // 16 % self.row_tiles or self.waves_m > WAVES:
            return f"stage 2 tile_m {self.tile_m} does not fit an intermediate size of {self.inter}"
        if self.lds_bytes > LDS_BYTES:
            return f"stage 2 tile_m {self.tile_m}: the rows of {self.inter} values do not fit LDS"
        if self.hidden % (TILE_N * PAIR):
            return f"hidden size {self.hidden} is not a multiple of {TILE_N * PAIR} (stage 2)"
        for axis, tile, size in (("K", self.tile_k, self.inter), ("N", self.tile_n, self.hidden)):
            if tile not in STAGE2_TILES[axis] or size % tile:
                legal = ", ".join(map(str, STAGE2_TILES[axis]))
                return f"stage 2 tile_{axis.lower()} {tile} is not one of {legal} that divides {size}"
        return None


@dataclass(frozen=True)
class ByTokenConfig(KernelConfig):
    """Stage 2 and the reduction in one, for few tokens: a workgroup takes tile_n channels of all slots of a token."""

    hidden: int
    inter: int
    top_k: int
    experts: int
    weights: WeightFormat = INT4

    @property
    def hints(self) -> dict[str, int]:
        # At T = 8 all run at once; with 512 k MXFP4 would spill registers.
        return {"waves_per_eu": 2 if self.weights.block and self.inter > 256 else 3}

    @property
    def tile_n(self) -> int:
        """Output channels of a workgroup: a wave has all weights of its slots in flight at once."""
        return 64 if self.inter <= 256 else 32

    @property
    def slots(self) -> int:
        """Slots of a wave."""
        return self.top_k // WAVES

    def grid(self, tokens: int) -> tuple[int, int, int]:
        return self.hidden // self.tile_n, tokens, 1

    def problem(self) -> str | None:
        if self.inter % CHUNK_K or not CHUNK_K <= self.inter <= 1024 or self.hidden % self.tile_n:
            return f"stage 2 by token: {self.inter} x {self.hidden} is no multiple of {CHUNK_K} x {self.tile_n}"
        if self.top_k % WAVES:
            return f"stage 2 by token: {self.top_k} slots are no multiple of {WAVES}"
        return None


@dataclass(frozen=True)
class QuantizeConfig:
    """Quantize rows of `columns` bfloat16 or float32 values, inside other kernels."""

    columns: int
    bf16: bool
    together: bool = False

    @property
    def waves_per_row(self) -> int:
        """Waves a row: the whole workgroup for long rows or where it works `together`, else one wave."""
        return WAVES if self.columns > 2048 or self.together else 1


@dataclass(frozen=True)
class ReduceConfig(KernelConfig):
    """Sum out[t] = sum over s of scale[t, s] * slots[t, s], in the order of s; slots without an expert are left out.

    bf16: the slots are bfloat16 (the W4A16 baseline's), else float16.
    """

    hidden: int
    top_k: int
    experts: int
    bf16: bool = False

    def grid(self, count: tuple[int, int]) -> tuple[int, int, int]:
        """Return the workgroups for `count`, (tokens, columns)."""
        tokens, columns = count
        return -(-columns // REDUCED), -(-tokens // WAVES), 1

    def problem(self) -> str | None:
        return f"hidden size {self.hidden} is not a multiple of 8" if self.hidden % 8 else None


@dataclass(frozen=True)
class W4A16Config(KernelConfig):
    """Compile-time parameters of the W4A16 baseline: stage 1 gathers tokens and applies SiLU, stage 2 takes slots."""

    stage: int
    hidden: int
    inter: int
    top_k: int
    tile_m: int

    @property
    def k(self) -> int:
        """Length of a row."""
        return self.hidden if self.stage == 1 else self.inter

    @property
    def columns(self) -> int:
        """Output channels."""
        return self.inter if self.stage == 1 else self.hidden

    @property
    def tile_n(self) -> int:
        """Output channels of a workgroup."""
        return WAVES * 16 if self.stage == 1 else WAVES * 16 * W4A16_TILES

    def grid(self, blocks: int) -> tuple[int, int, int]:
        return self.columns // self.tile_n, blocks, 1

    def problem(self) -> str | None:
        if self.k % CHUNK_K or self.columns % self.tile_n:
            return f"W4A16 stage {self.stage}: {self.k} x {self.columns} is no multiple of {CHUNK_K} x {self.tile_n}"
        return None


@dataclass(frozen=True)
class RouteConfig(KernelConfig):
    """The first launch: sorts the slots by expert into blocks of tile_m rows, and quantizes the bfloat16 tokens.

    hidden: columns of a token; 0 leaves the tokens as they are (the W4A16 baseline).
    """

    experts: int
    top_k: int
    tile_m: int
    hidden: int = 0

    def grid(self, tokens: int) -> tuple[int, int, int]:
        rows = WAVES // QuantizeConfig(self.hidden, bf16=True).waves_per_row  # of a workgroup
        return SORTERS + (-(-tokens // rows) if self.hidden else 0), 1, 1

    def problem(self) -> str | None:
        return f"rows of {self.hidden} values: not a multiple of 16" if self.hidden % (2 * LOW_K_BIT) else None

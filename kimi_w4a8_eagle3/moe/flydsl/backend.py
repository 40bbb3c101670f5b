"""The FlyDSL backend for gfx942: chooses tiles and launches the code objects that `warm` compiled, in order.

A forward launches route and quantize (one kernel), stage 1, stage 2 (one row a slot) and reduce. Up to 64 tokens stage
1 also routes and quantizes, and up to 16 stage 2 also reduces. A prefill runs stage 2 and reduce by chunks of columns;
its first stage 2 quantizes the rows for the others. FLYDSL_W4A16_HYBRID runs the BF16 baseline instead: route, stage 1,
stage 2, reduce. Grids follow from shapes alone and nothing waits for the device, so a call can be captured in a graph.
`prepare` loads every kernel that a layer may launch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from ...base.errors import KimiError
from ...gates import PREFILL_ROWS, STAGE2_TILES, tile_gate
from ...quark.weight_format import INT4
from ..contract import GateReader, MoeShape, PreparedMoe, QuarkMoeWeights, check_call, gpu_arch
from ..routing import max_blocks
from ..tiles import TABLE, bucket_of, buckets, find_row
from . import kernel_arguments as arguments
from . import layout as layout
from .configs import (
    OWN_ROWS,
    OWN_SLOTS,
    ByTokenConfig,
    FlydslTiles,
    KernelConfig,
    ReduceConfig,
    RouteConfig,
    Stage1Config,
    Stage2Config,
    W4A16Config,
)
from .objects import ARCH, GATE, MANIFEST, CodeObjects, code_objects, objects_folder

_MAX_BUFFER = 2**32 - 1  # bytes that a buffer descriptor spans
# Most bytes of slots between stage 2 and the reduction: 1,024 columns of 10,240 tokens. They stay in the last-level
# cache (256 MiB on MI300X and MI325X) beside the weights that stream through.
PARTIAL_BYTES = 160 << 20
W4A16_GATE = "FLYDSL_W4A16_HYBRID"
XCD_GATE = "KIMI_MOE_XCD_ORDER"
W4A16_ROWS = 32  # most rows of a block with which the baseline still has more than one wave a SIMD

Kernels = dict[str, KernelConfig]
Tables = tuple[torch.Tensor, torch.Tensor]  # order and blocks of `kernel_arguments.Routed`
Extent = int | tuple[int, int]  # row blocks, rows or tokens; and columns, where a launch computes only some of them


class FlydslBackend:
    """W4A8 MoE in FlyDSL for gfx942 (MI300X, MI325X)."""

    name = "flydsl"

    def __init__(self, gates: GateReader | None = None, table: Path = TABLE) -> None:
        self._gates: GateReader = gates if gates is not None else {}
        self._table = table
        self._plans: dict[tuple[MoeShape, int], Kernels] = {}

    def unsupported(self, shape: MoeShape, device: torch.device) -> str | None:
        """Return the reason why this backend cannot run `shape` on `device`, or None.

        Raises KimiError as `shape_problem` does, and for code objects that are foreign, altered or, in the folder that
        KIMI_KERNELS names, missing.
        """
        arch = gpu_arch(device)
        if arch != ARCH:
            return f"needs a {ARCH} GPU, {device} is {arch or 'no GPU'}"
        folder, problem = objects_folder(self._gates), self.shape_problem(shape)
        if problem is None and not self._gates.get(GATE) and not (folder / MANIFEST).exists():
            return f"no code objects in {folder}: run `kimi-w4a8 warm` where FlyDSL is installed, or set {GATE}"
        if problem is None:
            self.objects.check(map(repr, self.wanted(shape)))
        return problem

    def shape_problem(self, shape: MoeShape) -> str | None:
        """Return the reason why no tile fits `shape`, or None.

        Raises KimiError when only the tiles of the gates do not fit: tiles that the operator requested must not
        silently select another, slower backend.
        """
        try:
            self.wanted(shape)
        except KimiError as error:
            asked = any(value is not None for value in self._asked().values())
            own = (self._table_tiles(shape, tokens) for tokens in buckets(self.name, self._table))
            if asked and not any(_problem(self._kernels(shape, tiles)) for tiles in own):
                raise
            return str(error)
        return None

    def describe(self, shape: MoeShape, device: torch.device) -> str:
        """Describe the tile choices for a few batches, for the log."""
        tiles = "; ".join(f"T<={t}: {self.tiles_for(shape, t).to_row()}" for t in (8, 160, 10240))
        return f"code objects of {objects_folder(self._gates)} | {tiles}"

    def prepare(self, weights: QuarkMoeWeights) -> PreparedMoe:
        """Repack one layer into the layout of its format, and load its kernels on the device of the weights."""
        if weights.w13.is_cuda:
            for config in self.wanted(weights.shape):
                self.objects.load(config, device_of(weights.w13))
        return layout.prepare(weights)

    @cached_property
    def objects(self) -> CodeObjects:
        """The compiled kernels; raises KimiError when they are not for this GPU and package."""
        return code_objects(objects_folder(self._gates))

    # -- tiles ----------------------------------------------------------------------------------------------------
    def tiles_for(self, shape: MoeShape, tokens: int) -> FlydslTiles:
        """Return the table's tiles, fitted to the shape, with the gates' tiles put over them unchanged."""
        return self._gated(self._table_tiles(shape, tokens))

    def _table_tiles(self, shape: MoeShape, tokens: int) -> FlydslTiles:
        row = find_row(self.name, ARCH, shape, tokens, self._table)
        if row is None:
            raise KimiError(f"no FlyDSL tiles for {tokens} tokens", where=str(self._table))
        tiles = FlydslTiles.from_row(row["tiles"])
        if tiles.tile_m == OWN_ROWS and not fits_small(shape, tiles, row["max_tokens"]):
            tiles = _sorted_before(tiles)
        tiles = replace(tiles, stage2=fitted(shape, *tiles.stage2))
        smaller = (FlydslTiles(rows, (64, 256), fitted(shape, 256, 256)) for rows in (32, 16))
        fit = (these for these in (tiles, *smaller) if not _stage2(shape, these).problem())  # their rows fit LDS
        return next(fit, tiles)

    def _asked(self) -> dict[tuple[int, str], int | None]:
        """Return the tile sizes that the gates fix, by stage and axis."""
        return {(stage, axis): self._gates.get(tile_gate(stage, axis)) for stage in (1, 2) for axis in "MNK"}

    def _gated(self, tiles: FlydslTiles) -> FlydslTiles:
        asked = self._asked()
        rows = {m for s in (1, 2) if (m := asked[s, "M"]) is not None}
        if len(rows) > 1:
            raise KimiError(
                f"both stages use the same blocks of rows, but the gates set {sorted(rows)}",
                where="AITER_FLYDSL_STAGE1_TILE_M and AITER_FLYDSL_STAGE2_TILE_M",
                expected="the same number for both, or only one of them set",
            )
        if tiles.tile_m == OWN_ROWS and {asked[1, "N"], asked[1, "K"]} - {None, *tiles.stage1}:
            tiles = _sorted_before(tiles)
        tile_m = rows.pop() if rows else tiles.tile_m
        if tile_m != tiles.tile_m:  # another kind of kernel takes its own defaults instead of the table's
            decode = tile_m < PREFILL_ROWS
            tiles = FlydslTiles(tile_m, (64, 256 if decode else 128), tiles.stage2)
        (n1, k1), (n2, k2) = tiles.stage1, tiles.stage2
        stage1, stage2 = (asked[1, "N"] or n1, asked[1, "K"] or k1), (asked[2, "N"] or n2, asked[2, "K"] or k2)
        return replace(tiles, stage1=stage1, stage2=stage2, by_token=tiles.by_token and stage2 == tiles.stage2)

    def configs(self, shape: MoeShape, tokens: int) -> Kernels:
        """Return every kernel that a batch launches; batches of one bucket share this plan."""
        key = shape, bucket_of(self.name, tokens, self._table)
        if key not in self._plans:
            self._plans[key] = self.configs_of(shape, self.tiles_for(shape, tokens))
        return self._plans[key]

    def configs_of(self, shape: MoeShape, tiles: FlydslTiles) -> Kernels:
        """Return every kernel that these tiles need; raise KimiError when one does not exist."""
        baseline = self._gates.get(W4A16_GATE)
        rows = min(max(tiles.tile_m, 16), W4A16_ROWS)
        kernels = _w4a16_configs(shape, rows) if baseline else self._kernels(shape, tiles)
        if problem := _problem(kernels):
            raise KimiError(problem, where=f"FlyDSL tiles {tiles.to_row()}", remedy="unset the AITER_FLYDSL_*_TILE_*")
        return kernels

    def _kernels(self, shape: MoeShape, tiles: FlydslTiles) -> Kernels:
        # The gates apply to decode only: prefill loses its loads in flight when the compiler schedules it.
        unpinned = tiles.tile_m < PREFILL_ROWS
        pinned = [not (unpinned and self._gates.get(f"FLYDSL_MOE_STAGE{s}_SCHED") is False) for s in (1, 2)]
        prefill = tiles.tile_m >= PREFILL_ROWS
        by_xcd = prefill and self._gates.get(XCD_GATE) is not False
        kernels: Kernels = {
            "route": RouteConfig(shape.num_experts, shape.top_k, tiles.tile_m, shape.hidden),
            "stage1": _stage1(shape, tiles, pinned[0], by_xcd),
            "stage2": replace(_stage2(shape, tiles), pinned=pinned[1], by_xcd=by_xcd),
            "reduce": ReduceConfig(shape.hidden, shape.top_k, shape.num_experts),
        }
        if tiles.tile_m == OWN_ROWS:
            del kernels["route"]
        if tiles.by_token:
            del kernels["reduce"]
            kernels["stage2"] = _by_token(shape)
        return kernels

    def wanted(self, shape: MoeShape) -> list[KernelConfig]:
        """Return every kernel that some batch launches, each once."""
        plans = [self.configs(shape, tokens) for tokens in buckets(self.name, self._table)]
        return list(dict.fromkeys(config for plan in plans for config in plan.values()))

    # -- running --------------------------------------------------------------------------------------------------
    def forward(
        self, x: torch.Tensor, moe: PreparedMoe, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """Run both stages; see MoeBackend.forward for shapes.

        A row of x with NaN or Inf makes its own output NaN and no other. T = 0 gives an empty result.
        """
        check_call(x, moe, layout.name(moe.shape.weights), topk_weights, topk_ids)
        if x.shape[0] == 0:
            return torch.empty_like(x)
        kernels = self.configs(moe.shape, x.shape[0])
        problem = size_problem(moe.shape, x.shape[0], columns_at_once(kernels, x.shape[0] * moe.shape.top_k))
        if problem:
            raise KimiError(problem, remedy="smaller prefill chunks")
        return FlydslCall(self, kernels, x, moe, topk_weights, topk_ids).run()

    def launch(self, config: KernelConfig, count: Extent, passed: object) -> None:
        """Launch one kernel over `count` (see `KernelConfig.grid`) with its dataclass of `kernel_arguments.py`."""
        given = tuple(vars(passed).values())
        numbers = tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in given)
        self.objects.launch(config, count, device_of(given[0]), stream_of(given[0]), numbers)

    def blocks(self, slots: int, experts: int, tile_m: int) -> int:
        """Return the row blocks to launch: those that can have rows, or all with AITER_FLYDSL_MOE_GRID_TRIM=0."""
        if self._gates.get("AITER_FLYDSL_MOE_GRID_TRIM") is False:
            return (slots + experts * (tile_m - 1)) // tile_m
        return max_blocks(slots, experts, tile_m)


def _stage1(shape: MoeShape, tiles: FlydslTiles, pinned: bool = True, by_xcd: bool = False) -> Stage1Config:
    size = (shape.hidden, shape.inter, shape.top_k, tiles.tile_m)
    experts = shape.num_experts if tiles.tile_m == OWN_ROWS else 0
    return Stage1Config(*size, *tiles.stage1, pinned, by_xcd, experts, shape.weights)


def _stage2(shape: MoeShape, tiles: FlydslTiles) -> Stage2Config:
    size = (shape.hidden, shape.inter, shape.top_k, max(tiles.tile_m, 16))
    short = tiles.tile_m == OWN_ROWS and shape.inter % 256 == 0
    return Stage2Config(*size, *tiles.stage2, short=short, weights=shape.weights)


def _by_token(shape: MoeShape) -> ByTokenConfig:
    return ByTokenConfig(shape.hidden, shape.inter, shape.top_k, shape.num_experts, shape.weights)


def _problem(kernels: Kernels) -> str | None:
    """Return the reason why one of the kernels cannot be built, or None."""
    return next((problem for config in kernels.values() if (problem := config.problem())), None)


def _sorted_before(tiles: FlydslTiles) -> FlydslTiles:
    """Return tiles whose slots are sorted in a launch of their own, in place of stage 1 that sorts them itself."""
    return FlydslTiles(16, (32, 256), tiles.stage2)


def fitted(shape: MoeShape, n: int, k: int) -> tuple[int, int]:
    """Return the nearest tile of stage 2 that divides this shape."""
    n = max((width for width in STAGE2_TILES["N"] if width <= n and shape.hidden % width == 0), default=n)
    return n, k if shape.inter % k == 0 else layout.CHUNK_K


def fits_small(shape: MoeShape, tiles: FlydslTiles, most_tokens: int | None) -> bool:
    """True if the kernels for few tokens take this shape; otherwise slots are sorted in a separate launch."""
    if most_tokens is None or most_tokens * shape.top_k > OWN_SLOTS or _stage1(shape, tiles).problem():
        return False
    return not (tiles.by_token and _by_token(shape).problem())


def _w4a16_configs(shape: MoeShape, tile_m: int) -> Kernels:
    if shape.weights != INT4:
        raise KimiError(f"the W4A16 baseline has no kernels for {shape.weights} weights", remedy=f"unset {W4A16_GATE}")
    size = (shape.hidden, shape.inter, shape.top_k, tile_m)
    return {
        "route": RouteConfig(shape.num_experts, shape.top_k, tile_m),
        "stage1": W4A16Config(1, *size),
        "stage2": W4A16Config(2, *size),
        "reduce": ReduceConfig(shape.hidden, shape.top_k, shape.num_experts, bf16=True),
    }


def stream_of(tensor: torch.Tensor) -> int:
    """Return HIP's handle of the current stream of a tensor's device; 0, the default stream, for host memory."""
    return int(torch.cuda.current_stream(tensor.device).cuda_stream) if tensor.is_cuda else 0


def device_of(tensor: torch.Tensor) -> int:
    """Return HIP's number of a tensor's device."""
    return tensor.device.index or 0


@dataclass
class FlydslCall:
    """Buffers and launches of one forward."""

    backend: FlydslBackend
    kernels: Kernels
    x: torch.Tensor
    moe: PreparedMoe
    weights: torch.Tensor  # of the router
    ids: torch.Tensor

    def __post_init__(self) -> None:
        self.x, self.weights, self.ids = self.x.contiguous(), self.weights.contiguous(), self.ids.contiguous()
        self.tokens, self.slots = self.x.shape[0], self.ids.numel()
        routed = self.kernels.get("route")
        assert routed is None or isinstance(routed, RouteConfig)
        self.blocks = self.backend.blocks(self.slots, routed.experts, routed.tile_m) if routed else self.slots
        self.baseline = routed is not None and not routed.hidden

    def run(self) -> torch.Tensor:
        """Launch all kernels; return bfloat16 [T, H]."""
        a8, info, tables = self.route()
        if self.baseline:
            return self._run_w4a16(tables)
        return self.down(self.stage1(a8, info, tables), tables)

    def route(self) -> tuple[torch.Tensor, torch.Tensor, Tables]:
        """Return (int8 [T, H], its row info, the blocks of rows); see `sort_slots.py`. The baseline has no int8 rows.

        Where stage 1 sorts and quantizes, returns the tokens, the expert ids and empty tables that stage 1 fills.
        """
        if "route" not in self.kernels:
            order = self._new((self.slots * OWN_ROWS,), torch.int32)
            return self.x, self.ids, (order, self._new((self.slots, 4), torch.int32))
        a8, info = self._quantized(self.x[:0] if self.baseline else self.x)
        tables = self._new((self.slots,), torch.int32), self._new((self.blocks, 4), torch.int32)
        given = arguments.RouteArguments(self.x, self.ids, a8, info, *tables, self.tokens, self.blocks)
        self._launch("route", self.tokens, given)
        return a8, info, tables

    def stage1(self, a8: torch.Tensor, info: torch.Tensor, tables: Tables) -> torch.Tensor:
        """Compute gate, up and SiLU: float32 [S, I] by slot."""
        moe, h = self.moe, self._new((self.slots, self.moe.shape.inter), torch.float32)
        given = arguments.Stage1Arguments(a8, info, moe.w13, moe.s13, *tables, out=h, tokens=self.tokens)
        self._launch("stage1", self.blocks, given)
        return h

    def down(self, h: torch.Tensor, tables: Tables) -> torch.Tensor:
        """Run stage 2 and the sum over a token's slots, by chunks of columns: bfloat16 [T, H]."""
        moe, hidden = self.moe, self.moe.shape.hidden
        out, step = torch.empty_like(self.x), columns_at_once(self.kernels, self.slots)
        if "reduce" not in self.kernels:
            by_token = arguments.ByTokenArguments(h, moe.w2, moe.s2, router=self.weights, ids=self.ids, out=out)
            self._launch("stage2", self.tokens, by_token)
            return out
        partial, (kept, info) = self._new((self.slots * step,), torch.float16), self._quantized(h)
        down = arguments.Stage2Arguments(
            h, info, moe.w2, moe.s2, *tables, router=self.weights, out=partial, kept=kept, tokens=self.tokens
        )
        total = arguments.ReduceArguments(partial, info, self.ids, out, self.tokens)
        for column in range(0, hidden, step):
            chunk = {"column": column, "columns": min(step, hidden - column)}
            self._launch("stage2", (self.blocks, chunk["columns"]), replace(down, **chunk))
            self._launch("reduce", (self.tokens, chunk["columns"]), replace(total, **chunk))
        return out

    def _run_w4a16(self, tables: Tables) -> torch.Tensor:
        """Run the baseline with bfloat16 activations; nothing is quantized, the reduction scales by router weight."""
        shape, blocks = self.moe.shape, self.blocks
        h = self._new((self.slots, shape.inter), torch.bfloat16)
        first = arguments.W4A16Arguments(self.x, self.moe.w13, self.moe.s13, *tables, out=h, tokens=self.tokens)
        self._launch("stage1", blocks, first)
        slots = self._new((self.slots, shape.hidden), torch.bfloat16)
        second = arguments.W4A16Arguments(h, self.moe.w2, self.moe.s2, *tables, out=slots, tokens=self.tokens)
        self._launch("stage2", blocks, second)
        scale = torch.nn.functional.pad(self.weights.view(-1, 1), (0, 1))
        out = torch.empty_like(self.x)
        total = arguments.ReduceArguments(slots, scale, self.ids, out, self.tokens, columns=shape.hidden)
        self._launch("reduce", (self.tokens, shape.hidden), total)
        return out

    def _new(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=self.x.device)

    def _launch(self, name: str, count: Extent, passed: object) -> None:
        self.backend.launch(self.kernels[name], count, passed)

    def _quantized(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate (int8 like x, [rows, 2] of float32 scale and int32 low sum) for a kernel to fill."""
        return self._new(tuple(x.shape), torch.int8), self._new((len(x), 2), torch.int32)


def columns_at_once(kernels: Kernels, slots: int) -> int:
    """Return the columns of one stage 2 launch: even parts of hidden whose slots take at most PARTIAL_BYTES."""
    stage2 = kernels["stage2"]
    if isinstance(stage2, W4A16Config | ByTokenConfig):
        return stage2.hidden  # the baseline keeps all slots in memory, the kernel by token keeps none
    assert isinstance(stage2, Stage2Config)
    tiles = stage2.hidden // stage2.tile_n
    fitting = max(PARTIAL_BYTES // (2 * slots * stage2.tile_n), 1)
    return -(-tiles // -(-tiles // fitting)) * stage2.tile_n


def size_problem(shape: MoeShape, tokens: int, columns: int) -> str | None:
    """Return the reason why a batch is too large, or None.

    Every buffer, with one row past its end, must be addressable by 32-bit offsets. columns: those of the slots that one
    launch of stage 2 writes.
    """
    row_bytes = max(2 * shape.top_k * columns, 2 * shape.hidden, 4 * shape.top_k * shape.inter)
    return f"{tokens} tokens exceed the kernels' 4 GiB buffers" if (tokens + 1) * row_bytes > _MAX_BUFFER else None

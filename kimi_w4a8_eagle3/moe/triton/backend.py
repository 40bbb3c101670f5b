"""The Triton backend: layout, tile choice and launches; the kernels are in kernels.py.

A decode batch takes five launches (quantize and route in one; stage 1; quantize; stage 2; reduce). It takes four when
stage 1's tile covers the intermediate size, because stage 1 then quantizes itself. There is no host sync, and every
grid follows from shapes alone.

Stage 2 writes each slot's row as float16, and a second kernel adds the slots in a fixed order, so results are
deterministic and independent of the batch and of the tiles. In prefill stage 2 runs in column chunks whose partial rows
stay in the last-level cache (`partial_mib`), instead of writing and reading back [T, top_k, H] through memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs

from ...base.errors import KimiError
from ..contract import MoeShape, PreparedMoe, QuarkMoeWeights, check_call, gpu_arch
from ..reference import silu
from ..routing import ROUTE_IN_KERNEL, Routing, empty_routing, route
from ..tiles import TABLE, bucket_of, find_row
from . import kernels as kernels
from .layout import LAYOUT, prepare

_MAX_INT32 = 2**31 - 1

LaunchKernel = Callable[..., Any]  # (kernel, grid, *arguments, **constants and options)


@dataclass(frozen=True)
class StageTile:
    """Tile of a stage: block_n output columns by block_k packed bytes (2 * block_k values) of K a step."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class TritonTiles:
    """One tile choice; block_m rows (slots) of one expert. partial_mib bounds stage 2's partial rows."""

    block_m: int
    stage1: StageTile
    stage2: StageTile
    partial_mib: int

    @classmethod
    def from_row(cls, tiles: dict[str, Any]) -> TritonTiles:
        """Read the `tiles` of a table row, {"block_m", "stage1": [n, k, warps, stages], "stage2", "partial_mib"}."""
        try:
            stage1, stage2 = StageTile(*tiles["stage1"]), StageTile(*tiles["stage2"])
            return cls(int(tiles["block_m"]), stage1, stage2, int(tiles["partial_mib"]))
        except (KeyError, TypeError, ValueError) as error:
            raise KimiError(f"a Triton row of the tile table is malformed: {error!r}", where=str(tiles)) from error

    def to_row(self) -> dict[str, Any]:
        """Return the `tiles` of a table row, the inverse of `from_row`."""
        stages = {
            name: [tile.block_n, tile.block_k, tile.num_warps, tile.num_stages]
            for name, tile in (("stage1", self.stage1), ("stage2", self.stage2))
        }
        return {"block_m": self.block_m, **stages, "partial_mib": self.partial_mib}


def run_kernel(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel. Proofs pass a launcher that only compiles."""
    kernel[grid](*arguments, **constants)


class TritonBackend:
    """W4A8 MoE in Triton for NVIDIA and AMD GPUs (and for Triton's interpreter, which runs it on a CPU)."""

    name = "triton"

    def __init__(
        self,
        tiles: TritonTiles | None = None,
        table: Path = TABLE,
        arch: str | None = None,
        launch: LaunchKernel = run_kernel,
    ) -> None:
        """tiles: use these instead of the table's. arch: compile for it instead of the device's own."""
        self._tiles = tiles
        self._table = table
        self._arch = arch
        self._launch = launch
        self._plans: dict[tuple[MoeShape, int, str], TritonTiles] = {}

    def unsupported(self, shape: MoeShape, device: torch.device) -> str | None:
        """Return the reason why this backend cannot run `shape` on `device`, or None."""
        if device.type != "cuda" and not knobs.runtime.interpret:
            return f"needs a GPU, got {device} (TRITON_INTERPRET=1 runs it on a CPU, slowly)"
        multiple = 2 * (shape.weights.block or 8)  # a byte holds one element of each half of K
        if shape.hidden % multiple or shape.inter % multiple:
            return f"hidden {shape.hidden} and inter {shape.inter} must be multiples of {multiple}"
        if (shape.num_experts + 1) * ROUTE_IN_KERNEL > _MAX_INT32:
            return f"{shape.num_experts} experts do not fit the sort key"
        return None

    def describe(self, shape: MoeShape, device: torch.device) -> str:
        """Describe the tile choices for a few batches, for the log."""
        arch = self._arch or gpu_arch(device) or "any"
        return "; ".join(f"T<={t}: {self.tiles_for(shape, t, arch).to_row()}" for t in (8, 160, 10240))

    def tiles_for(self, shape: MoeShape, tokens: int, arch: str) -> TritonTiles:
        """Return the tiles of a batch; batches of one bucket share this plan.

        They are those given at construction, else the table's, cut down to the size of the shape.
        """
        key = shape, bucket_of(self.name, tokens, self._table), arch
        if key not in self._plans:
            tiles = self._tiles or self._row(shape, tokens, arch)
            self._plans[key] = replace(
                tiles,
                stage1=_fit(tiles.stage1, shape.inter, shape.hidden),
                stage2=_fit(tiles.stage2, shape.hidden, shape.inter),
            )
        return self._plans[key]

    def _row(self, shape: MoeShape, tokens: int, arch: str) -> TritonTiles:
        row = find_row(self.name, arch, shape, tokens, self._table)
        if row is None:
            raise KimiError(f"no Triton tiles for {arch}, {tokens} tokens", where=str(self._table))
        return TritonTiles.from_row(row["tiles"])

    def prepare(self, weights: QuarkMoeWeights) -> PreparedMoe:
        """Repack one layer; see layout.py."""
        return prepare(weights)

    def forward(
        self, x: torch.Tensor, moe: PreparedMoe, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """Run both stages; see MoeBackend.forward for shapes and docs/moe.md for NaN, Inf and T = 0."""
        check_call(x, moe, LAYOUT, topk_weights, topk_ids)
        if x.shape[0] * max(moe.shape.hidden, moe.shape.top_k * moe.shape.inter) > _MAX_INT32:
            raise KimiError(f"{x.shape[0]} tokens overflow the kernels' int32 offsets", remedy="smaller prefill chunks")
        # Triton's interpreter truncates to bfloat16 where a GPU rounds to nearest even, so torch rounds its results.
        out = torch.empty_like(x, dtype=torch.float32 if knobs.runtime.interpret else torch.bfloat16)
        if x.shape[0] == 0:
            return out.to(torch.bfloat16)
        arch = self._arch or gpu_arch(x.device) or "any"
        tiles = self.tiles_for(moe.shape, x.shape[0], arch)
        call = MoeCall(x, moe, topk_weights, topk_ids, tiles, self._launch, nvidia=arch.startswith("sm_"))
        call.run(out)
        return out.to(torch.bfloat16)


class MoeCall:
    """Sizes, buffers and launches of one forward."""

    def __init__(
        self,
        x: torch.Tensor,
        moe: PreparedMoe,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        tiles: TritonTiles,
        launch: LaunchKernel = run_kernel,
        nvidia: bool = False,
    ) -> None:
        self.x, self.moe, self.tiles, self.nvidia = x.contiguous(), moe, tiles, nvidia
        self._launch = partial(launch, enable_fp_fusion=False)  # the same bits whatever Triton's default is
        self.weights, self.ids = topk_weights.contiguous(), topk_ids.contiguous()
        self.tokens, self.slots = x.shape[0], topk_ids.numel()

    def run(self, out: torch.Tensor) -> None:
        """Run both stages into `out`, bfloat16 [T, H]."""
        q, scale, routing = self.quantize_and_route()
        act, factor = (self.stage1_in_parts if self.moe.more else self.stage1)(q, scale, routing)
        self.down(act, factor, routing, out)

    def down(self, act: torch.Tensor, factor: torch.Tensor, routing: Routing, out: torch.Tensor) -> None:
        """Run stage 2 and the sum over the slots, by column chunks."""
        hidden = self.moe.shape.hidden
        columns = self._chunk_columns()
        stage2 = self.stage2_in_parts if self.moe.more else self.stage2
        partial = self._new((self.slots * columns,), torch.float32 if self.moe.more else torch.float16)
        for column in range(0, hidden, columns):
            width = min(columns, hidden - column)
            stage2(act, routing, partial, column, width)
            self._reduce(partial, factor, out, column, width)

    def _new(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=self.x.device)

    def _chunk_columns(self) -> int:
        """Return the columns of stage 2 at a time: all, or the whole tiles whose partial rows fit partial_mib."""
        hidden, block_n = self.moe.shape.hidden, self.tiles.stage2.block_n
        fitting = (self.tiles.partial_mib << 20) // (2 * self.slots)
        fitting = min(fitting, _MAX_INT32 // self.slots)
        return hidden if fitting >= hidden else max(fitting // block_n, 1) * block_n

    def quantize_and_route(self) -> tuple[torch.Tensor, torch.Tensor, Routing]:
        """Return (q int8 [T, H], scale float32 [T], the routing)."""
        shape, block_m = self.moe.shape, self.tiles.block_m
        q = self._new((self.tokens, shape.hidden), torch.int8)
        scale = self._new((self.tokens,), torch.float32)
        in_kernel = self.slots <= ROUTE_IN_KERNEL
        if in_kernel:
            routing = empty_routing(self.slots, shape.num_experts, block_m, self.x.device)
        else:
            routing = route(self.ids, shape.num_experts, block_m)
        sizes = self._sizes("H", "TOP_K", "E")
        sizes |= {"HP": triton.next_power_of_2(shape.hidden), "EP": triton.next_power_of_2(shape.num_experts + 1)}
        sizes |= {"SP": max(triton.next_power_of_2(self.slots), 32) if in_kernel else 32, "BM": block_m}
        given = (self.x, q, scale, self.ids, *routing.tables, self.tokens)
        grid = (self.tokens + in_kernel,)
        self._launch(kernels.quantize_and_route, grid, *given, **sizes, ROUTE=in_kernel, num_warps=8)
        return q, scale, routing

    def stage1_in_parts(
        self, q: torch.Tensor, scale: torch.Tensor, routing: Routing
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `stage1` does, with a sum of its own for each part of the weights. Rows not routed have any."""
        slots = routing.order.long().clamp(0, self.slots - 1)
        row_scale, experts = scale[slots // self.moe.shape.top_k, None], self._experts()[slots]
        sums = ((self.stage1(q, scale, routing, "acc", part)[0], part.s13) for part in self.moe.parts)
        gate, up = reduce(torch.add, [acc.float() * row_scale * s13[experts] for acc, s13 in sums]).chunk(2, 1)
        factor = self._new((self.slots,), torch.float32)
        return self._quantize((silu(gate) * up).contiguous(), factor, routing), factor

    def stage2_in_parts(
        self, act: torch.Tensor, routing: Routing, out: torch.Tensor, column: int, columns: int
    ) -> None:
        """Write what `stage2` does, in float32, with a sum of its own for each part of the weights."""
        shape, experts = self.moe.shape, self._experts()
        acc, rows = self._new((self.slots, columns), torch.int32), out[: self.slots * columns].view(-1, columns)
        rows.zero_()
        for part in self.moe.parts:
            self.stage2(act, routing, acc, column, columns, "acc", part)
            scales = part.s2[: -shape.num_experts].view(-1, shape.hidden)[:, column : column + columns]
            rows += acc.float() * scales[experts]

    def _experts(self) -> torch.Tensor:
        """Return the expert of each slot, and some expert of a slot that has none."""
        return self.ids.flatten().long().clamp(0, self.moe.shape.num_experts - 1)

    def stage1(
        self, q: torch.Tensor, scale: torch.Tensor, routing: Routing, mode: str = "", part: PreparedMoe | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (int8 [S, I] in sorted order, factor by slot); mode "acc": (int32 [S, 2I] of a part, unused)."""
        shape, tile, moe = self.moe.shape, self.tiles.stage1, part or self.moe
        mode = mode or ("quant" if tile.block_n >= shape.inter else "float")
        dtype = {"float": torch.float32, "quant": torch.int8, "acc": torch.int32}[mode]
        act = self._new((self.slots, shape.inter * (2 if mode == "acc" else 1)), dtype)
        factor = self._new((self.slots,), torch.float32)
        grid = (routing.max_blocks * triton.cdiv(shape.inter, tile.block_n),)
        shifts = moe.s13 if moe.shift13 is None else moe.shift13
        given = (q, scale, moe.w13, moe.s13, shifts, *routing.tables, act, factor, self.weights, moe.s2)
        constants = self._sizes("H", "INTER", "E", "TOP_K") | self._tile_constants(tile)
        self._launch(kernels.stage1, grid, *given, **constants, LEFT=True, MODE=mode)
        return (act, factor) if mode != "float" else (self._quantize(act, factor, routing), factor)

    def _quantize(self, act: torch.Tensor, factor: torch.Tensor, routing: Routing) -> torch.Tensor:
        shape = self.moe.shape
        q = self._new((self.slots, shape.inter), torch.int8)
        padded = triton.next_power_of_2(shape.inter)
        rows = max(1024 // padded, 1)
        given = (act, q, factor, routing.order, self.ids, self.weights, self.moe.s2, self.slots)
        constants = self._sizes("H", "INTER", "E") | {"IP": padded, "ROWS": rows}
        self._launch(kernels.quantize_act, (triton.cdiv(self.slots, rows),), *given, **constants, num_warps=4)
        return q

    def stage2(
        self,
        act: torch.Tensor,
        routing: Routing,
        out: torch.Tensor,
        column: int,
        columns: int,
        mode: str = "partial",
        part: PreparedMoe | None = None,
    ) -> None:
        """Write columns column..column+columns-1 to out [S, columns] by slot: float16, or int32 with mode "acc"."""
        tile, moe = self.tiles.stage2, part or self.moe
        grid = (routing.max_blocks * triton.cdiv(columns, tile.block_n),)
        shifts = moe.s2 if moe.shift2 is None else moe.shift2
        given = (act, moe.w2, moe.s2, shifts, *routing.tables, out, column // 16, columns // 16)
        constants = self._sizes("H", "INTER") | self._tile_constants(tile)
        self._launch(kernels.stage2, grid, *given, **constants, LEFT=self.nvidia, MODE=mode)

    def _reduce(
        self, partial: torch.Tensor, factor: torch.Tensor, out: torch.Tensor, column: int, columns: int
    ) -> None:
        block_n = min(1024, triton.next_power_of_2(columns))
        given = (partial, factor, self.ids, out, column // 16, columns // 16)
        constants = self._sizes("H", "TOP_K", "E") | {"BN": block_n}
        self._launch(
            kernels.reduce_slots, (self.tokens, triton.cdiv(columns, block_n)), *given, **constants, num_warps=4
        )

    def _sizes(self, *names: str) -> dict[str, Any]:
        shape = self.moe.shape
        sizes = {"H": shape.hidden, "INTER": shape.inter, "E": shape.num_experts, "TOP_K": shape.top_k}
        return {name: sizes[name] for name in names}

    def _tile_constants(self, tile: StageTile) -> dict[str, Any]:
        return {
            "BM": self.tiles.block_m,
            "BN": tile.block_n,
            "BK": tile.block_k,
            "STAGES": tile.num_stages,
            "MX": self.moe.shift13 is not None,
            "PTX": self.nvidia and not knobs.runtime.interpret,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }


def _fit(tile: StageTile, columns: int, k: int) -> StageTile:
    """Limit a tile to the size of the matrix; 16 and 32 are the least that every GPU's int8 dot takes."""
    block_n = min(tile.block_n, max(triton.next_power_of_2(columns), 16))
    block_k = min(tile.block_k, max(triton.next_power_of_2(k // 2), 32))
    return replace(tile, block_n=block_n, block_k=block_k)

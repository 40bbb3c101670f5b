"""Tiles for which a kernel exists: what `warm` compiles, and what `tune-moe` chooses from."""

from __future__ import annotations

from itertools import product

from ....gates import STAGE1_TILES, STAGE2_TILES
from ...contract import MoeShape
from ...tiles import BLOCK_SIZES
from ..backend import W4A16_GATE, XCD_GATE, FlydslBackend, fits_small, fitted
from ..configs import OWN_TILES, FlydslTiles, KernelConfig, Stage1Config, Stage2Config


def stage1_tiles(shape: MoeShape, tile_m: int) -> list[tuple[int, int]]:
    """Return the (n, k) tiles of stage 1 that have a kernel for this block size."""
    tiles = [(n, k) for m, n, k in STAGE1_TILES if m == tile_m]
    size = (shape.hidden, shape.inter, shape.top_k, tile_m)
    return [tile for tile in tiles if not Stage1Config(*size, *tile).problem()]


def stage2_tiles(shape: MoeShape, tile_m: int) -> list[tuple[int, int]]:
    """Return the (n, k) tiles of stage 2 that have a kernel for this block size."""
    size = (shape.hidden, shape.inter, shape.top_k, tile_m)
    tiles = product(STAGE2_TILES["N"], STAGE2_TILES["K"])
    return [tile for tile in tiles if not Stage2Config(*size, *tile).problem()]


def small_tiles(shape: MoeShape, tokens: int) -> list[FlydslTiles]:
    """Return the tiles whose stage 1 sorts its slots itself, for a batch of few slots."""
    pairs = product(OWN_TILES, (False, True))
    found = [FlydslTiles(m, (n, k), fitted(shape, 256, 256), by_token) for (m, n, k), by_token in pairs]
    return [tiles for tiles in found if fits_small(shape, tiles, tokens)]


def every_kernel(shape: MoeShape) -> list[KernelConfig]:
    """Return every kernel that `tune-moe` tries or that a server of this shape can launch.

    Covers any gates and any tile table.
    """
    found = list[KernelConfig]()
    unpinned = {"FLYDSL_MOE_STAGE1_SCHED": False, "FLYDSL_MOE_STAGE2_SCHED": False}
    for tile_m in BLOCK_SIZES:
        stage1, stage2 = stage1_tiles(shape, tile_m), stage2_tiles(shape, tile_m)
        for gates in ({}, unpinned, {XCD_GATE: False}, {W4A16_GATE: "w2_bf16"}):
            # A kernel belongs to one stage, so each tile needs to appear in one pair only.
            for index in range(max(len(stage1), len(stage2)) if stage1 and stage2 else 0):
                tiles = FlydslTiles(tile_m, stage1[index % len(stage1)], stage2[index % len(stage2)])
                found += FlydslBackend(gates).configs_of(shape, tiles).values()
    for gates in ({}, unpinned):
        for tiles in small_tiles(shape, 1):
            found += FlydslBackend(gates).configs_of(shape, tiles).values()
    return list(dict.fromkeys(found))

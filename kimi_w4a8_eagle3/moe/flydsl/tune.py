"""The FlyDSL backend's tile candidates and their timing."""

from __future__ import annotations

from itertools import product

import torch

from ...base.errors import KimiError
from ...gates import STAGE1_TILES, STAGE2_TILES, tile_gate
from ..contract import GateReader, MoeShape
from ..tune import BLOCK_SIZES, Measure, Space, Timer, pairs, random_batch, random_layer
from .backend import (
    W4A16_GATE,
    XCD_GATE,
    FlydslBackend,
    FlydslCall,
    fits_small,
    fitted,
    size_problem,
)
from .configs import OWN_TILES, FlydslTiles, KernelConfig, Stage1Config, Stage2Config


def flydsl_space(shape: MoeShape) -> Space:
    """Return every tile for which a kernel exists."""

    def stage1(tile_m: int) -> list[tuple[int, int]]:
        tiles = [(n, k) for m, n, k in STAGE1_TILES if m == tile_m]
        size = (shape.hidden, shape.inter, shape.top_k, tile_m)
        return [tile for tile in tiles if not Stage1Config(*size, *tile).problem()]

    def stage2(tile_m: int) -> list[tuple[int, int]]:
        size = (shape.hidden, shape.inter, shape.top_k, tile_m)
        tiles = product(STAGE2_TILES["N"], STAGE2_TILES["K"])
        return [tile for tile in tiles if not Stage2Config(*size, *tile).problem()]

    return Space(FlydslBackend.name, stage1, stage2, FlydslTiles, lambda tiles, tokens: small_tiles(shape, tokens))


def small_tiles(shape: MoeShape, tokens: int) -> list[FlydslTiles]:
    """Return the tiles whose stage 1 sorts its slots itself, for a batch of few slots."""
    pairs = product(OWN_TILES, (False, True))
    found = [FlydslTiles(m, (n, k), fitted(shape, 256, 256), by_token) for (m, n, k), by_token in pairs]
    return [tiles for tiles in found if fits_small(shape, tiles, tokens)]


def every_kernel(shape: MoeShape) -> list[KernelConfig]:
    """Return every kernel that `tune-moe` tries or that a server of this shape can launch.

    Covers any gates and any tile table.
    """
    space, found = flydsl_space(shape), list[KernelConfig]()
    unpinned = {"FLYDSL_MOE_STAGE1_SCHED": False, "FLYDSL_MOE_STAGE2_SCHED": False}
    for tile_m in BLOCK_SIZES:
        for gates in ({}, unpinned, {XCD_GATE: False}, {W4A16_GATE: "w2_bf16"}):
            for stages in pairs(space, tile_m):
                found += FlydslBackend(gates).configs_of(shape, FlydslTiles(tile_m, *stages)).values()
    for gates in ({}, unpinned):
        for tiles in small_tiles(shape, 1):
            found += FlydslBackend(gates).configs_of(shape, tiles).values()
    return list(dict.fromkeys(found))


def refuse_fixed_tiles(gates: GateReader) -> None:
    """Raise KimiError for a gate that would replace every candidate by one kernel."""
    names = [tile_gate(stage, axis) for stage in (1, 2) for axis in "MNK"] + [W4A16_GATE]
    given = [name for name in names if gates.get(name)]
    if given:
        raise KimiError(
            f"{', '.join(given)} would override the tiles that tune-moe measures",
            where="environment",
            remedy=f"unset {' '.join(given)}",
        )


def flydsl_measure(shape: MoeShape, backend: FlydslBackend, device: torch.device, timer: Timer) -> Measure:
    """Time tiles with random weights and uniformly routed tokens."""
    moe = backend.prepare(random_layer(shape, device))

    def measure(tiles: FlydslTiles, tokens: int) -> tuple[float | None, float | None]:
        if size_problem(shape, tokens, tiles.stage2[0]):
            return None, None
        x, weights, ids = random_batch(shape, tokens, device)
        call = FlydslCall(backend, backend.configs_of(shape, tiles), x, moe, weights, ids)
        tables = call.route()[2]
        h = torch.zeros(call.slots, shape.inter, device=device)
        return timer(lambda: call.stage1(*call.route())), timer(lambda: call.down(h, tables))

    return measure

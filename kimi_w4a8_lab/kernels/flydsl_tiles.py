"""The FlyDSL backend's tile candidates as a search space, and their timing."""

from __future__ import annotations

from functools import partial

import torch

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.gates import tile_gate
from kimi_w4a8_eagle3.moe.contract import GateReader, MoeShape
from kimi_w4a8_eagle3.moe.flydsl.backend import W4A16_GATE, FlydslBackend, FlydslCall, size_problem
from kimi_w4a8_eagle3.moe.flydsl.configs import FlydslTiles
from kimi_w4a8_eagle3.moe.flydsl.kernels.candidates import small_tiles, stage1_tiles, stage2_tiles

from .random_layers import random_batch, random_layer
from .tile_search import MeasureTile, Space, Timer


def flydsl_space(shape: MoeShape) -> Space:
    """Return every tile for which a kernel exists."""
    return Space(
        FlydslBackend.name,
        partial(stage1_tiles, shape),
        partial(stage2_tiles, shape),
        FlydslTiles,
        lambda tiles, tokens: small_tiles(shape, tokens),
    )


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


def flydsl_measure(shape: MoeShape, backend: FlydslBackend, device: torch.device, timer: Timer) -> MeasureTile:
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

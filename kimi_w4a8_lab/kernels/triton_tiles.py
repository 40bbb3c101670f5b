"""The Triton backend's tile candidates and their timing."""

from __future__ import annotations

from dataclasses import replace

import torch

from kimi_w4a8_eagle3.moe.contract import MoeShape
from kimi_w4a8_eagle3.moe.triton.backend import LaunchKernel, MoeCall, StageTile, TritonBackend, TritonTiles, run_kernel

from .random_layers import random_batch, random_layer
from .tile_search import MeasureTile, Space, Timer

_STAGE1_N, _STAGE2_N = (16, 32, 64, 128, 256), (64, 128, 256)
_BLOCK_K = (64, 128, 256)
_WARPS, _STAGES = (4, 8), (2, 3, 4)
_PARTIAL_MIB = (32, 128, 512)


def triton_space(shape: MoeShape) -> Space:
    """Return every stage tile for every block size, and as variants the budgets of stage 2's partial rows."""
    return Space(
        "triton",
        stage1=lambda block_m: _candidates(_STAGE1_N, shape.inter, shape.hidden),
        stage2=lambda block_m: _candidates(_STAGE2_N, shape.hidden, shape.inter),
        join=lambda block_m, stage1, stage2: TritonTiles(block_m, stage1, stage2, _PARTIAL_MIB[1]),
        variants=lambda tiles, tokens: [replace(tiles, partial_mib=mib) for mib in _PARTIAL_MIB],
    )


def triton_measure(
    shape: MoeShape, arch: str, device: torch.device, timer: Timer, launch: LaunchKernel = run_kernel
) -> MeasureTile:
    """Time tiles with random weights and uniformly routed tokens."""
    moe = TritonBackend().prepare(random_layer(shape, device))

    def measure(tiles: TritonTiles, tokens: int) -> tuple[float | None, float | None]:
        x, weights, ids = random_batch(shape, tokens, device)
        call = MoeCall(x, moe, weights, ids, tiles, launch, nvidia=arch.startswith("sm_"))
        q, scale, routing = call.quantize_and_route()
        act = torch.zeros(ids.numel(), shape.inter, dtype=torch.int8, device=device)
        factor, out = torch.ones(ids.numel(), device=device), torch.empty_like(x)
        return timer(lambda: call.stage1(q, scale, routing)), timer(lambda: call.down(act, factor, routing, out))

    return measure


def _candidates(block_n: tuple[int, ...], columns: int, k: int) -> list[StageTile]:
    """Return tiles within the matrix; a K loop of one step is not pipelined, so its stages are not varied."""
    found = []
    for n in block_n:
        for step in _BLOCK_K:
            if n > max(columns, 16) or step > max(k // 2, 32):
                continue
            for warps in _WARPS:
                stages = _STAGES if k // 2 > step else _STAGES[:1]
                found += [StageTile(n, step, warps, count) for count in stages]
    return found or [StageTile(16, 32, 4, 2)]

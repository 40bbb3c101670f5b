"""Search Triton tiles by measurement: stage 1 and stage 2 are timed apart, for each block size and batch."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .contract import MoeShape, QuarkMoeWeights
from .tiles import Row
from .triton_backend import MoeCall, StageTile, TritonBackend, TritonTiles

if TYPE_CHECKING:
    import torch

BATCHES = (2, 8, 40, 160, 512, 2048, 10240)
_STAGE1_N, _STAGE2_N = (16, 32, 64, 128, 256), (64, 128, 256)
_BLOCK_K = (64, 128, 256)
_WARPS, _STAGES = (4, 8), (2, 3, 4)
_PARTIAL_MIB = (32, 128, 512)

# (tiles, tokens) -> microseconds of stage 1 with what follows it, of stage 2 with the reduction; None: does not run.
Measure = Callable[[TritonTiles, int], tuple[float | None, float | None]]


@dataclass(frozen=True)
class Best:
    """The fastest tiles found for a batch."""

    tokens: int
    tiles: TritonTiles
    stage1_us: float
    stage2_us: float


def search(shape: MoeShape, batches: Iterable[int], measure: Measure) -> Iterator[Best]:
    """The fastest tiles for each batch: every stage tile for every block size, then the partial-row budgets."""
    for tokens in batches:
        best = min((_search_block(shape, tokens, m, measure) for m in _block_sizes(shape, tokens)), key=_total)
        for mib in _PARTIAL_MIB:
            tiles = TritonTiles(best.tiles.block_m, best.tiles.stage1, best.tiles.stage2, mib)
            time = measure(tiles, tokens)[1]
            if time is not None and time < best.stage2_us:
                best = Best(tokens, tiles, best.stage1_us, time)
        yield best


def table_rows(found: Iterable[Best], shape: MoeShape, arch: str, gpu: str) -> list[Row]:
    """Rows of the tile table: each batch is the upper bound of its row, the last row has none."""
    best = list(found)
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return [
        {
            "backend": "triton",
            "arch": arch,
            "hidden": shape.hidden,
            "inter": shape.inter,
            "max_tokens": None if entry is best[-1] else entry.tokens,
            "tiles": entry.tiles.to_row(),
            "source": f"measured: {gpu}, {today}, T={entry.tokens}: stage 1 {entry.stage1_us:.1f} us, "
            f"stage 2 {entry.stage2_us:.1f} us",
        }
        for entry in best
    ]


def gpu_measure(shape: MoeShape, arch: str, device: torch.device) -> Measure:
    """Time tiles on the GPU at hand, with random weights and uniformly routed tokens."""
    import torch
    from triton.testing import do_bench

    moe = TritonBackend().prepare(random_layer(shape, device))

    def time_us(function: Callable[[], object]) -> float | None:
        try:
            return 1000 * float(do_bench(function, warmup=5, rep=20))
        except Exception as error:  # Triton raises its own types for a tile that needs too much memory or registers
            if "out of memory" in str(error).lower():
                raise
            return None

    def measure(tiles: TritonTiles, tokens: int) -> tuple[float | None, float | None]:
        x, weights, ids = random_batch(shape, tokens, device)
        call = MoeCall(x, moe, weights, ids, tiles, nvidia=arch.startswith("sm_"))
        q, scale, routing = call.quantize_and_route()
        act = torch.zeros(ids.numel(), shape.inter, dtype=torch.int8, device=device)
        factor, out = torch.ones(ids.numel(), device=device), torch.empty_like(x)
        return (
            time_us(lambda: call.stage1(q, scale, routing)),
            time_us(lambda: call.down(act, factor, routing, out)),
        )

    return measure


def random_layer(shape: MoeShape, device: torch.device) -> QuarkMoeWeights:
    """Weights with uniform nibbles and scales of a trained model's size."""
    import torch

    generator = torch.Generator(device).manual_seed(0)

    def words(*size: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31 - 1, size, dtype=torch.int32, device=device, generator=generator)

    def scales(*size: int) -> torch.Tensor:
        return torch.rand(size, device=device, generator=generator) * 0.005 + 0.001

    e, h, i = shape.num_experts, shape.hidden, shape.inter
    return QuarkMoeWeights(shape, words(e, 2 * i, h // 8), words(e, h, i // 8), scales(e, 2 * i), scales(e, h))


def random_batch(shape: MoeShape, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, router weights, expert ids): each token takes top_k distinct experts, all equally likely."""
    import torch

    generator = torch.Generator(device).manual_seed(tokens)
    x = torch.randn(tokens, shape.hidden, device=device, generator=generator).bfloat16()
    logits = torch.rand(tokens, shape.num_experts, device=device, generator=generator)
    weights, ids = logits.topk(shape.top_k, dim=1)
    return x, weights / weights.sum(1, keepdim=True), ids.int()


def _block_sizes(shape: MoeShape, tokens: int) -> list[int]:
    """Block sizes around the rows that an expert gets; more than twice that is padding."""
    rows = tokens * shape.top_k / shape.num_experts
    return [size for size in (16, 32, 64, 128) if size == 16 or size <= 2 * rows]


def _search_block(shape: MoeShape, tokens: int, block_m: int, measure: Measure) -> Best:
    """Time both stages' candidates in one pass: the i-th of each shares a call."""
    stage1 = _candidates(_STAGE1_N, shape.inter, shape.hidden)
    stage2 = _candidates(_STAGE2_N, shape.hidden, shape.inter)
    times1: dict[StageTile, float] = {}
    times2: dict[StageTile, float] = {}
    for index in range(max(len(stage1), len(stage2))):
        first, second = stage1[index % len(stage1)], stage2[index % len(stage2)]
        time1, time2 = measure(TritonTiles(block_m, first, second, _PARTIAL_MIB[1]), tokens)
        times1[first] = float("inf") if time1 is None else time1
        times2[second] = float("inf") if time2 is None else time2
    first, second = min(times1, key=times1.__getitem__), min(times2, key=times2.__getitem__)
    return Best(tokens, TritonTiles(block_m, first, second, _PARTIAL_MIB[1]), times1[first], times2[second])


def _candidates(block_n: tuple[int, ...], columns: int, k: int) -> list[StageTile]:
    """Tiles within the matrix; a K loop of one step is not pipelined, so its stages are not varied."""
    found = []
    for n in block_n:
        for step in _BLOCK_K:
            if n > max(columns, 16) or step > max(k // 2, 32):
                continue
            for warps in _WARPS:
                stages = _STAGES if k // 2 > step else _STAGES[:1]
                found += [StageTile(n, step, warps, count) for count in stages]
    return found or [StageTile(16, 32, 4, 2)]


def _total(best: Best) -> float:
    return best.stage1_us + best.stage2_us

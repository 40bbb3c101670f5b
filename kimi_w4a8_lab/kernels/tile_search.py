"""Search tiles by measurement: stage 1 and stage 2 are timed apart, for each block size and batch.

A backend's `Space` lists its candidates. `triton_tiles.py` and `flydsl_tiles.py` make one each, with its timing.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.files import write_atomic
from kimi_w4a8_eagle3.moe.contract import MoeShape
from kimi_w4a8_eagle3.moe.tiles import BLOCK_SIZES, TileRow, buckets, read_rows

BATCHES = (2, 8, 40, 160, 512, 2048, 10240)
INFINITE = float("inf")


class Tiles(Protocol):
    """Tile choice of a backend."""

    def to_row(self) -> dict[str, Any]:
        """Return the `tiles` of a table row."""
        ...


# Returns the microseconds of one call, or None when it does not run.
Timer = Callable[[Callable[[], object]], float | None]
# (tiles, tokens) -> microseconds (up to stage 2, of stage 2 with the reduction), None where it does not run.
MeasureTile = Callable[[Any, int], tuple[float | None, float | None]]


@dataclass(frozen=True)
class Space:
    """The candidates of a backend for one shape.

    stage1, stage2: block size -> tiles of that stage, empty where the block size has no kernel.
    join: (block size, tile of stage 1, tile of stage 2) -> tiles.
    variants: (the best tiles, tokens) -> further tiles to try.
    """

    backend: str
    stage1: Callable[[int], list[Any]]
    stage2: Callable[[int], list[Any]]
    join: Callable[[int, Any, Any], Tiles]
    variants: Callable[[Any, int], list[Any]] = lambda tiles, tokens: []


@dataclass(frozen=True)
class Best:
    """The fastest tiles found for a batch."""

    tokens: int
    tiles: Tiles
    stage1_us: float
    stage2_us: float


def search(shape: MoeShape, batches: Iterable[int], space: Space, measure: MeasureTile) -> Iterator[Best]:
    """Yield the fastest tiles of each batch: try all stage tiles for all block sizes, then variants of the best.

    Raises KimiError when none runs.
    """
    for tokens in batches:
        found = (_search_block(tokens, block_m, space, measure) for block_m in _block_sizes(shape, tokens))
        best = min((entry for entry in found if entry is not None), key=_total, default=None)
        if best is None or _total(best) == INFINITE:
            raise KimiError(f"no tile of the {space.backend} backend ran", where=f"T={tokens}, {shape}")
        for tiles in space.variants(best.tiles, tokens):
            time1, time2 = measure(tiles, tokens)
            if time1 is not None and time2 is not None and time1 + time2 < _total(best):
                best = Best(tokens, tiles, time1, time2)
        yield best


def table_rows(found: Iterable[Best], backend: str, shape: MoeShape, arch: str, gpu: str) -> list[TileRow]:
    """Return rows of the tile table: each batch is the upper bound of its row, and the last row has no bound."""
    best = list(found)
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return [
        {
            "backend": backend,
            "arch": arch,
            "hidden": shape.hidden,
            "inter": shape.inter,
            "weights": shape.weights.name,
            "max_tokens": None if entry is best[-1] else entry.tokens,
            "tiles": entry.tiles.to_row(),
            "source": f"measured: {gpu}, {today}, T={entry.tokens}: stage 1 {entry.stage1_us:.1f} us, "
            f"stage 2 {entry.stage2_us:.1f} us",
        }
        for entry in best
    ]


def merged(rows: Iterable[TileRow], new: list[TileRow]) -> list[TileRow]:
    """Return `rows` with those of the same backend, GPU, shape and format replaced by `new`."""
    replaced = {_key(row) for row in new}
    return [row for row in rows if _key(row) not in replaced] + new


def gpu_timer(function: Callable[[], object]) -> float | None:
    """Return the microseconds of one call on the current GPU, or None when the tile does not compile or run."""
    from triton.testing import do_bench  # Triton is optional

    try:
        return 1000 * float(do_bench(function, warmup=5, rep=20))
    except KimiError:  # a missing code object is an error, not a slow tile
        raise
    except Exception as error:  # compilers raise their own types for a tile that needs too much memory or registers
        if "out of memory" in str(error).lower():
            raise
        return None


def pairs(space: Space, block_m: int) -> list[tuple[Any, Any]]:
    """Pair tiles of stage 1 and stage 2, each at least once; return none where a stage has no kernel."""
    stage1, stage2 = space.stage1(block_m), space.stage2(block_m)
    count = max(len(stage1), len(stage2)) if stage1 and stage2 else 0
    return [(stage1[index % len(stage1)], stage2[index % len(stage2)]) for index in range(count)]


def _block_sizes(shape: MoeShape, tokens: int) -> list[int]:
    """Return the block sizes up to twice the rows that an expert gets; larger blocks would be mostly padding."""
    rows = tokens * shape.top_k / shape.num_experts
    return [size for size in BLOCK_SIZES if size == BLOCK_SIZES[0] or size <= 2 * rows]


def _search_block(tokens: int, block_m: int, space: Space, measure: MeasureTile) -> Best | None:
    """Time both stages' candidates in one pass; a pair of tiles shares a call."""
    times1: dict[Any, float] = {}
    times2: dict[Any, float] = {}
    for first, second in pairs(space, block_m):
        time1, time2 = measure(space.join(block_m, first, second), tokens)
        times1[first] = INFINITE if time1 is None else time1
        times2[second] = INFINITE if time2 is None else time2
    if not times1:
        return None
    first, second = min(times1, key=times1.__getitem__), min(times2, key=times2.__getitem__)
    return Best(tokens, space.join(block_m, first, second), times1[first], times2[second])


def _key(row: TileRow) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in ("backend", "arch", "hidden", "inter", "weights"))


def _total(best: Best) -> float:
    return best.stage1_us + best.stage2_us


def write_rows(rows: list[TileRow], path: Path) -> None:
    """Replace a tile table atomically, with one row a line so that a review sees the changes."""
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    write_atomic(path, f"[\n{lines}\n]\n")
    read_rows.cache_clear()
    buckets.cache_clear()

"""The tile table `tiles.json`: the tiles that a backend takes for an architecture, a shape and a batch.

A row holds for batches of at most `max_tokens` tokens (null: any) and, when it names `hidden` and `inter`, for that
shape alone. With `weights` it holds for one format of the weights. `source` gives the origin of the choice:
"measured: ..." by `kimi-w4a8 tune-moe`, or how it was derived.
"""

from __future__ import annotations

import json
import sys
from bisect import bisect_left
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..base.errors import KimiError
from .contract import MoeShape

BLOCK_SIZES = (16, 32, 64, 128)  # rows of a block that a search tries
TABLE = Path(__file__).with_name("tiles.json")
_KEYS = ("backend", "arch", "hidden", "inter", "max_tokens", "tiles", "source")

TileRow = dict[str, Any]


@lru_cache(maxsize=4)
def read_rows(path: Path = TABLE) -> tuple[TileRow, ...]:
    """Return all rows of a table; raise KimiError when it is unreadable or a row lacks a key."""
    try:
        rows = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise KimiError("the tiles cannot be read", where=f"{path}: {error}", remedy="kimi-w4a8 tune-moe") from error
    if not isinstance(rows, list):
        raise KimiError("the tile table is not a list", where=str(path), expected="a list of rows")
    for number, row in enumerate(rows):
        missing = [key for key in _KEYS if key not in row] if isinstance(row, dict) else list(_KEYS)
        if missing:
            raise KimiError(f"row {number} of the tile table lacks {', '.join(missing)}", where=str(path))
    return tuple(rows)


def find_row(backend: str, arch: str, shape: MoeShape, tokens: int, path: Path = TABLE) -> TileRow | None:
    """Return the row for a batch: exact shape before general, exact arch before "any", then the tightest bound.

    Of two such rows the one that names the format of the weights is returned.
    """
    candidates = [
        row
        for row in read_rows(path)
        if row["backend"] == backend
        and row["arch"] in (arch, "any")
        and row["hidden"] in (shape.hidden, None)
        and row["inter"] in (shape.inter, None)
        and row.get("weights") in (shape.weights.name, None)
        and (row["max_tokens"] is None or tokens <= row["max_tokens"])
    ]
    return min(candidates, key=_rank, default=None)


@lru_cache(maxsize=4)
def buckets(backend: str, path: Path = TABLE) -> tuple[int, ...]:
    """Return the largest batch of each bucket, ascending and the last unbounded; batches of a bucket share tiles."""
    bounds = {row["max_tokens"] for row in read_rows(path) if row["backend"] == backend}
    return (*sorted(bounds - {None}), sys.maxsize)


def bucket_of(backend: str, tokens: int, path: Path = TABLE) -> int:
    """Return the bucket of a batch, named by its largest batch."""
    bounds = buckets(backend, path)
    return bounds[bisect_left(bounds, tokens)]


def _rank(row: TileRow) -> tuple[bool, bool, float, bool]:
    bound = float("inf") if row["max_tokens"] is None else row["max_tokens"]
    return row["hidden"] is None, row["arch"] == "any", bound, "weights" not in row

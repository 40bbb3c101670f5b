"""Weight layout, routing tables and tile table of the Triton backend: plain torch, no kernel."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.packing import pack_reorder

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.moe.contract import MoeShape, PreparedMoe
from kimi_w4a8_eagle3.moe.routing import empty_routing, max_blocks, route
from kimi_w4a8_eagle3.moe.tiles import TABLE, bucket_of, find_row, read_rows
from kimi_w4a8_eagle3.moe.triton import backend as triton_backend
from kimi_w4a8_eagle3.moe.triton import layout as triton_layout
from kimi_w4a8_eagle3.moe.triton.backend import TritonBackend, TritonTiles
from kimi_w4a8_eagle3.quark.weight_format import INT4, MXFP4, WeightFormat
from kimi_w4a8_lab.kernels.tile_search import write_rows

KIMI = MoeShape(384, 7168, 256, 8)


@pytest.mark.parametrize("chunk_bytes", [1, 160, 1 << 24])
def test_byte_j_holds_elements_j_and_half_k_further(monkeypatch: pytest.MonkeyPatch, chunk_bytes: int) -> None:
    monkeypatch.setattr(triton_layout, "_CHUNK_BYTES", chunk_bytes)
    values = torch.randint(-8, 8, (3, 10, 64), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    int4 = triton_layout.halves(pack_reorder(values))
    assert int4.shape == (3, 10, 32) and int4.dtype == torch.int8
    assert torch.equal((int4 << 4) >> 4, values[..., :32])
    assert torch.equal(int4 >> 4, values[..., 32:])
    codes = torch.randint(0, 256, (3, 10, 32), dtype=torch.uint8)
    elements = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    mxfp4 = triton_layout.halves(codes).view(torch.uint8)
    assert torch.equal(mxfp4 & 15, elements[..., :32]) and torch.equal(mxfp4 >> 4, elements[..., 32:])


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_routing_covers_every_slot_once(data: st.DataObject) -> None:
    experts = data.draw(st.integers(1, 9))
    top_k = data.draw(st.integers(1, 4))
    block_m = data.draw(st.sampled_from([16, 32, 64]))
    tokens = data.draw(st.integers(1, 40))
    flat = data.draw(st.lists(st.integers(-1, experts), min_size=tokens * top_k, max_size=tokens * top_k))
    blocks = route(torch.tensor(flat, dtype=torch.int32).view(tokens, top_k), experts, block_m)

    used = int(blocks.num_blocks)
    assert used <= blocks.max_blocks
    seen: list[int] = []
    for block in range(used):
        expert, first, rows = (
            int(table[block]) for table in (blocks.block_expert, blocks.block_first, blocks.block_rows)
        )
        slots = blocks.order[first : first + rows].tolist()
        assert 1 <= rows <= block_m and all(flat[slot] == expert for slot in slots)
        seen += slots
    assert sorted(seen) == [slot for slot, expert in enumerate(flat) if 0 <= expert < experts]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 6), st.sampled_from([1, 2, 16]), st.lists(st.integers(0, 40), min_size=6, max_size=6))
def test_the_grid_bound_holds(experts: int, block_m: int, rows: list[int]) -> None:
    rows = rows[:experts]
    assert sum(-(-count // block_m) for count in rows) <= max_blocks(sum(rows), experts, block_m)


def test_the_grid_bound_is_reached() -> None:
    assert max_blocks(8, 384, 16) == 8  # one token: eight experts, a block each
    assert max_blocks(20 * 17, 20, 16) == 40  # one row past a full block in each of 20 experts
    assert empty_routing(20 * 17, 20, 16, torch.device("cpu")).max_blocks == 40


def test_empty_tables_begin_at_multiples_of_16_bytes_and_take_no_more() -> None:
    tables = empty_routing(5, 9, 16, torch.device("cpu")).tables
    assert [table.storage_offset() for table in tables] == [0, 8, 16, 24, 32]
    assert [table.numel() for table in tables] == [5, 5, 5, 5, 1] and tables[0].untyped_storage().nbytes() == 4 * 33


def test_the_blocks_of_an_expert_follow_each_other() -> None:
    ids = torch.tensor([1] * 5 + [0] * 3 + [1] * 4 + [-1]).view(-1, 1).int()
    blocks = route(ids, 2, 4)
    tables = torch.stack([blocks.block_expert, blocks.block_first, blocks.block_rows])[:, : int(blocks.num_blocks)]
    assert tables.tolist() == [[0, 1, 1, 1], [0, 3, 7, 11], [3, 4, 4, 1]]


@pytest.mark.parametrize("inter", [256, 512])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_90"])
def test_the_table_has_tiles_for_every_batch(arch: str, inter: int) -> None:
    shape = MoeShape(384, 7168, inter, 8)
    rows = [TritonBackend().tiles_for(shape, tokens, arch).block_m for tokens in (1, 8, 160, 600, 10240, 100_000)]
    assert rows == sorted(rows) and rows[0] == 16 and rows[-1] == 64


def test_an_exact_row_beats_a_general_one(tmp_path: Path) -> None:
    tiles = TritonTiles(16, triton_backend.StageTile(64, 64, 4, 2), triton_backend.StageTile(64, 64, 4, 2), 1).to_row()
    common = {"backend": "triton", "tiles": tiles, "source": "test"}
    rows = [
        common | {"arch": "any", "hidden": None, "inter": None, "max_tokens": None, "name": "general"},
        common | {"arch": "sm_90", "hidden": None, "inter": None, "max_tokens": None, "name": "arch"},
        common | {"arch": "sm_90", "hidden": 64, "inter": 32, "max_tokens": 100, "name": "shape"},
        common | {"arch": "sm_90", "hidden": 64, "inter": 32, "max_tokens": 10, "name": "shape, few tokens"},
        common
        | {"arch": "sm_90", "hidden": 64, "inter": 32, "max_tokens": 100, "name": "shape of a format"}
        | {"weights": "MXFP4"},
    ]
    path = tmp_path / "tiles.json"
    write_rows(rows, path)
    assert list(read_rows(path)) == rows and not list(tmp_path.glob("*.tmp"))

    def name(arch: str, tokens: int, weights: WeightFormat = INT4) -> str:
        row = find_row("triton", arch, MoeShape(4, 64, 32, 2, weights=weights), tokens, path)
        return str(row and row["name"])

    assert name("sm_90", 10) == "shape, few tokens"
    assert name("sm_90", 11) == "shape"
    assert name("sm_90", 101) == "arch"
    assert name("gfx942", 1) == "general"
    assert name("sm_90", 11, MXFP4) == "shape of a format"
    assert name("sm_90", 10, MXFP4) == "shape, few tokens"  # the bound comes first


@pytest.mark.parametrize("content", ["{", "{}", '[{"backend": "triton"}]'])
def test_a_broken_table_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tiles.json"
    path.write_text(content)
    with pytest.raises(KimiError, match=r"tiles\.json"):
        read_rows(path)


def test_every_row_names_its_source() -> None:
    assert all(row["source"].split()[0].rstrip(":") in ("counted", "measured") for row in read_rows(TABLE))


def test_unsupported_says_why() -> None:
    backend = TritonBackend()
    assert "GPU" in str(backend.unsupported(MoeShape(4, 64, 32, 2), torch.device("cpu")))
    assert "multiples of 16" in str(backend.unsupported(MoeShape(4, 72, 32, 2), torch.device("cuda")))
    assert "sort key" in str(backend.unsupported(MoeShape(1 << 20, 64, 32, 2), torch.device("cuda")))
    assert backend.unsupported(KIMI, torch.device("cuda")) is None


def test_tiles_are_found_once_for_all_batches_of_a_bucket() -> None:
    backend = TritonBackend()
    first = backend.tiles_for(KIMI, 33, "gfx942")
    assert backend.tiles_for(KIMI, 384, "gfx942") is first
    for other in (backend.tiles_for(KIMI, 385, "gfx942"), backend.tiles_for(KIMI, 33, "sm_90")):
        assert other != first
    assert backend.tiles_for(MoeShape(384, 64, 32, 8), 33, "gfx942").stage1.block_n == 32  # of another shape
    assert str(first.to_row()) in TritonBackend(arch="gfx942").describe(KIMI, torch.device("cpu"))


@pytest.mark.parametrize(("bounds", "tokens", "bucket"), [([4, 9], 4, 4), ([4, 9], 5, 9), ([4, None], 5, sys.maxsize)])
def test_a_bucket_ends_at_a_bound_of_the_table(
    tmp_path: Path, bounds: list[int | None], tokens: int, bucket: int
) -> None:
    path = tmp_path / "tiles.json"
    row = {"backend": "triton", "arch": "any", "hidden": None, "inter": None, "tiles": {}, "source": "test"}
    write_rows([row | {"max_tokens": bound} for bound in reversed(bounds)], path)
    assert bucket_of("triton", tokens, path) == bucket


def test_batches_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    def meta(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    moe = PreparedMoe(KIMI, triton_backend.LAYOUT, meta(1), meta(1), meta(1), meta(1))
    tokens = 2**31 // KIMI.hidden + 1
    call = meta(tokens, KIMI.hidden, dtype=torch.bfloat16), moe, meta(tokens, 8), meta(tokens, 8, dtype=torch.int32)
    with pytest.raises(KimiError, match="overflow"):
        TritonBackend().forward(*call)
    path = tmp_path / "tiles.json"
    write_rows([], path)
    with pytest.raises(KimiError, match="no Triton tiles for sm_90, 8 tokens"):
        TritonBackend(table=path).tiles_for(KIMI, 8, "sm_90")

"""The compiled FlyDSL kernels, executed instruction by instruction, against torch."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import flydsl as flydsl  # without it this module is skipped
import pytest
import torch
from support.extent import extent
from support.flydsl_layout import low_sums

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.gates import STAGE1_TILES
from kimi_w4a8_eagle3.moe.contract import MoeShape
from kimi_w4a8_eagle3.moe.flydsl.backend import FlydslBackend, FlydslCall
from kimi_w4a8_eagle3.moe.flydsl.configs import (
    OWN_ROWS,
    ByTokenConfig,
    FlydslTiles,
    ReduceConfig,
    RouteConfig,
    Stage1Config,
)
from kimi_w4a8_eagle3.moe.flydsl.kernel_arguments import ReduceArguments
from kimi_w4a8_eagle3.moe.reference import ReferenceBackend, quantize_rows
from kimi_w4a8_eagle3.moe.routing import route
from proof.assembly import assembly
from proof.gfx942 import DataRace, MachineError, parse_kernel
from proof.interpreted import (
    TOLERANCE,
    Batch,
    InterpretedBackend,
    call_of,
    check_stage1,
    check_stage2,
    check_sums,
    exact_sums,
    parsed,
    prepared,
    run_stage2,
)
from proof.sums import sums_of

pytestmark = pytest.mark.kernels

SHAPE = MoeShape(num_experts=6, hidden=1024, inter=256, top_k=2)
ROUTINGS = ("ragged", "one expert", "one token", "absent slots")
DECODE, PREFILL = FlydslTiles(16, (64, 256), (256, 256)), FlydslTiles(64, (128, 128), (1024, 256))
OWN = FlydslTiles(OWN_ROWS, (32, 256), (256, 256))
ORDERS = ("forward", "reverse", "roundrobin", random.Random(3))


def batch(kind: str, shape: MoeShape = SHAPE) -> Batch:
    """A batch in which expert 4 never gets a row."""
    g = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(4, generator=g)[:2] for _ in range(21)]).int()
    if kind == "one token":
        ids = torch.tensor([[3, 1]], dtype=torch.int32)
    if kind == "one expert":  # one row more than a prefill's short block
        ids = torch.tensor([[1, -1]] * 33, dtype=torch.int32)
    if kind == "absent slots":
        ids[4:9, 1] = -1
        ids[3] = -1
    x = torch.randn(len(ids), shape.hidden, generator=g).bfloat16()
    return x, torch.rand(ids.shape, generator=g), ids


def call(shape: MoeShape, tiles: FlydslTiles, given: Batch, order: Any = "lockstep") -> FlydslCall:
    backend = InterpretedBackend(order=order)
    return call_of(backend, shape, given, backend.configs_of(shape, tiles))


def special_rows(columns: int, dtype: torch.dtype) -> torch.Tensor:
    g = torch.Generator().manual_seed(2)
    x = torch.randn(9, columns, generator=g) * torch.tensor([1, 1e-3, 30, 1e-12, 1e30, 1, 1, 1, 1])[:, None]
    x[5] = 0
    x[6] = torch.arange(columns) % 255 - 127  # every integer once: ties and exact quotients
    x[7] = (torch.arange(columns) % 509 - 254) / 2.0
    return x.to(dtype)


TILES = ((16, 64, 256), (32, 32, 128), (64, 128, 128), (128, 64, 128))


# 5 and 7 chunks a wave: before, inside and after the rolled loop
@pytest.mark.parametrize("tile", extent(TILES, STAGE1_TILES))
def test_stage1_sums_are_exact(tile: tuple[int, int, int]) -> None:
    shape = replace(SHAPE, hidden=2560 if tile[2] == 128 else 3584, inter=128)
    check_stage1(call(shape, FlydslTiles(tile[0], tile[1:], (128, 128)), batch("ragged", shape)))


# Fewer chunks than the loop and the ring are made for, and waves whose last chunk is past the end.
@pytest.mark.slow
@pytest.mark.parametrize("tile", [(16, 64, 256), (16, 32, 128), (64, 128, 128)])
@pytest.mark.parametrize("hidden", extent([128, 512, 640], [128, 256, 512, 640, 1024, 1408, 1536]))
def test_stage1_short_k(tile: tuple[int, int, int], hidden: int) -> None:
    shape = replace(SHAPE, hidden=hidden, inter=128)
    check_stage1(call(shape, FlydslTiles(tile[0], tile[1:], (128, 128)), batch("one token", shape)))


STAGE2 = [  # inter, tile_m, tile_n, tile_k
    (128, 16, 128, 128), (256, 16, 128, 256), (256, 16, 256, 256), (256, 16, 512, 256), (256, 32, 256, 256),
    (512, 16, 256, 256), (512, 16, 256, 512), (512, 32, 128, 128), (1024, 16, 128, 512), (2048, 16, 256, 256),
    (256, 64, 1024, 256), (256, 64, 256, 128), (256, 128, 1024, 256), (512, 64, 1024, 256), (512, 128, 512, 256),
]  # fmt: skip


@pytest.mark.parametrize("inter,tile_m,tile_n,tile_k", extent(STAGE2[::3], STAGE2))
def test_stage2_sums_are_exact(inter: int, tile_m: int, tile_n: int, tile_k: int) -> None:
    shape = replace(SHAPE, hidden=2048, inter=inter)
    stage1 = next(tile[1:] for tile in STAGE1_TILES if tile[0] == tile_m)
    made = call(shape, FlydslTiles(tile_m, stage1, (tile_n, tile_k)), batch("absent slots", shape))
    check_stage2(made, made.route()[2], made.kernels["stage2"])


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("tile", extent(TILES[::2], TILES))
def test_ragged_routing(tile: tuple[int, int, int], kind: str) -> None:
    check_sums(call(SHAPE, FlydslTiles(tile[0], tile[1:], (512, 256)), batch(kind)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROUTINGS[:3])
@pytest.mark.parametrize("tiles", [DECODE, PREFILL, replace(OWN, by_token=False)], ids=["decode", "prefill", "few"])
def test_stage2_rounds_its_scaled_sums_to_float16(tiles: FlydslTiles, kind: str) -> None:
    """Ties away from zero."""
    made = call(replace(SHAPE, hidden=2048), tiles, batch(kind, replace(SHAPE, hidden=2048)))
    h, here = special_rows(256, torch.float32)[torch.arange(made.slots) % 9], made.ids.flatten() >= 0
    tables = made.route()[2] if "route" in made.kernels else check_stage1(made)
    found = run_stage2(made, tables, h, made.kernels["stage2"], torch.float16).slots[here].float()
    sums = exact_sums(made.moe.shape, 2, h, made.ids)[here].float()
    values = sums * made.moe.s2[made.ids.flatten()[here], :2048]
    rounded = (values.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)
    assert torch.equal(found, torch.where(values.abs() < 2.0**-14, values.half().float(), rounded))


# Four row tiles of a wave through LDS at once; one of each of two waves, twice.
@pytest.mark.parametrize(("inter", "order"), [(256, "reverse"), (512, "forward")])
def test_a_prefills_first_stage2_quantizes_for_the_others(inter: int, order: str) -> None:
    """It rounds as the reference does. NaN or Inf in a row gives it a NaN scale, so that only its token is NaN."""
    shape = replace(SHAPE, hidden=2048, inter=inter)
    made = call(shape, PREFILL, tuple(torch.cat([part] * 2) for part in batch("absent slots", shape)), order)
    flat, here = made.ids.flatten(), made.ids.flatten() >= 0
    h = special_rows(inter, torch.float32)[torch.arange(made.slots) % 9]
    h[2, 17], h[41, 255], h[43, 0] = float("nan"), float("inf"), float("-inf")
    _, kept, info = run_stage2(made, made.route()[2], h, made.kernels["stage2"], torch.float16)
    expected, scale = quantize_rows(h)
    whole = here & h.isfinite().all(1)
    assert torch.equal(kept[whole].float(), expected[whole]) and (kept[~here] == 0).all()
    assert torch.equal(info[whole, 1], low_sums(kept)[whole])
    found = info[:, 0].contiguous().view(torch.float32)
    assert torch.equal(found[whole], (scale[:, 0] * made.weights.flatten())[whole] * made.moe.s2[flat[whole], 2048])
    assert found[here & ~whole].isnan().all() and (~whole & here).sum() == 3


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS, ids=["forward", "reverse", "roundrobin", "random"])
@pytest.mark.parametrize(
    "tiles", [DECODE, FlydslTiles(64, (64, 128), (512, 256)), OWN], ids=["decode", "prefill", "few"]
)
def test_sums_under_adversarial_wave_orders(tiles: FlydslTiles, order: Any) -> None:
    shape = replace(SHAPE, hidden=512)
    check_sums(call(shape, tiles, batch("one token", shape), order))


FEW = MoeShape(num_experts=6, hidden=512, inter=128, top_k=4)


def rows_of_few_tokens(inter: int) -> tuple[torch.Tensor, Batch]:
    """(float32 rows, batch) of three tokens with four slots each."""
    g = torch.Generator().manual_seed(5)
    ids = torch.stack([torch.randperm(5, generator=g)[:4] for _ in range(3)]).int()
    ids[1, 2], ids[2] = -1, -1
    h = torch.randn(12, inter, generator=g) * torch.tensor([1, 30, 1e-30, 1e-3]).repeat(3)[:, None]
    h[3] = 0
    h[6, 1] = float("nan")  # of a slot without an expert
    return h, (torch.zeros(3, 512).bfloat16(), torch.rand(3, 4, generator=g), ids)


def by_token(inter: int, h: torch.Tensor, given: Batch, order: Any = "lockstep", tiles: Any = None) -> torch.Tensor:
    """Stage 2 and the sum over the slots; tiles: in two launches."""
    shape = replace(FEW, inter=inter)
    backend = InterpretedBackend(order=order)
    kernels: Any = {"stage2": ByTokenConfig(512, inter, 4, shape.num_experts)}
    made = call_of(backend, shape, given, backend.configs_of(shape, tiles) if tiles else kernels)
    return made.down(h, made.route()[2])


@pytest.mark.parametrize(("inter", "order"), [(128, "reverse"), (1024, random.Random(5))])
def test_stage2_by_token_has_the_bits_of_stage2_and_the_sum(inter: int, order: Any) -> None:
    h, given = rows_of_few_tokens(inter)
    two_launches = by_token(inter, h, given, tiles=FlydslTiles(16, (64, 256), (256, min(inter, 256))))
    assert torch.equal(by_token(inter, h, given, order), two_launches)
    h[0, 5] = float("inf")
    got = by_token(inter, h, given)
    assert got[0].isnan().all() and got[1:].isfinite().all() and (got[2] == 0).all()


@pytest.mark.parametrize("kind", ["ragged", "one expert", "absent slots"])
def test_stage1_that_sorts_lists_every_slot_once(kind: str) -> None:
    made = call(SHAPE, OWN, batch(kind), random.Random(3))
    order, blocks = check_stage1(made)
    slots, flat = [], made.ids.flatten()
    for expert, first, rows, _ in blocks.tolist():
        mine = order[first : first + rows].tolist()
        assert all(flat[slot] == expert for slot in mine) and len(mine) <= OWN_ROWS
        slots += mine
    assert sorted(slots) == (flat >= 0).nonzero().flatten().tolist()
    used = sum(-(-int((flat == expert).sum()) // OWN_ROWS) for expert in range(6))
    assert int((blocks[:, 2] > 0).sum()) == used  # no expert is read more often than its rows need


def test_stage1_that_sorts_takes_512_slots_and_long_rows() -> None:
    shape = replace(SHAPE, hidden=1536, inter=128)
    ids = torch.full((256, 2), -1, dtype=torch.int32)
    ids[[0, 70, 200, 255, 255], [1, 0, 1, 0, 1]] = torch.tensor([1, 1, 1, 1, 0], dtype=torch.int32)
    x = special_rows(1536, torch.bfloat16)[torch.arange(256) % 9]
    check_stage1(call(shape, FlydslTiles(OWN_ROWS, (16, 256), (128, 128)), (x, torch.ones(256, 2), ids)))


BARRIERS: dict[str, tuple[Any, int]] = {  # kernel, barriers
    "decode": (Stage1Config(1024, 128, 2, 16, 64, 256), 3),
    "prefill": (Stage1Config(1024, 128, 2, 64, 64, 128, by_xcd=True), 8),
    "few tokens": (Stage1Config(512, 128, 2, OWN_ROWS, 32, 256, experts=6), 2 * OWN_ROWS + 4),
    "by token": (ByTokenConfig(512, 128, 4, 6), 1),
}


@pytest.mark.parametrize("kernel", BARRIERS)
def test_a_missing_barrier_is_found(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The public kernels' write-after-read race, planted: without one barrier some order fails."""
    config, count = BARRIERS[kernel]
    h, few = rows_of_few_tokens(128)
    good = by_token(128, h, few, tiles=FlydslTiles(16, (64, 256), (256, 128)))
    one_block = torch.randn(4, 512).bfloat16(), torch.ones(4, 2), torch.tensor([[2, -1]] * 4, dtype=torch.int32)

    def run(order: str) -> bool:
        if kernel == "by token":
            return torch.equal(by_token(128, h, few, order), good)
        shape = replace(SHAPE, hidden=config.hidden, inter=128)
        tiles = FlydslTiles(config.tile_m, (config.tile_n, config.tile_k), (256, 128))
        check_stage1(call(shape, tiles, one_block if config.experts else batch("one token", shape), order))
        return True

    config = config if kernel == "by token" else sums_of(config)
    lines = assembly(config).splitlines()
    barriers = [n for n, line in enumerate(lines) if line.strip() == "s_barrier"]
    assert len(barriers) == count
    for number in barriers:
        plant(monkeypatch, config, "\n".join([*lines[:number], "\ts_nop 0", *lines[number + 1 :]]))
        try:
            found = not all(run(order) for order in ("forward", "reverse", "roundrobin"))
        except (DataRace, MachineError, KimiError):
            found = True
        assert found, f"the barrier in line {number + 1} could be removed unnoticed"


def plant(monkeypatch: pytest.MonkeyPatch, config: Any, text: str) -> None:
    """Let the interpreter execute this assembly as the kernel of a configuration."""
    kernel = parse_kernel(text)
    monkeypatch.setattr("proof.interpreted.parsed", lambda asked: kernel if asked == config else parsed(asked))


@pytest.mark.parametrize(
    "right,wrong", [("0xf0f0f0f0,", "0xf0f0f070,"), ("0xf0f0f0f,", "0xf0f0f0e,"), ("v_mfma_i32_16x16x32_i8", None)]
)
def test_a_wrong_mask_or_operand_is_found(right: str, wrong: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(SHAPE, hidden=512, inter=128)
    made = call(shape, FlydslTiles(16, (64, 256), (256, 128)), batch("ragged", shape))
    config = sums_of(made.kernels["stage1"])
    text = assembly(config)
    assert right in text
    if wrong is None:  # swap the two operands of the first MFMA: rows and weights change places
        line = next(x for x in text.splitlines() if right in x)
        opcode, _, operands = line.strip().partition(" ")
        d, a, b, c = operands.split(", ")
        broken = text.replace(line, f"\t{opcode} {d}, {b}, {a}, {c}", 1)
    else:
        broken = text.replace(right, wrong, 1)
    plant(monkeypatch, config, broken)
    with pytest.raises(KimiError, match="sums of stage 1 differ"):
        check_stage1(made)


def routed(x: torch.Tensor, ids: torch.Tensor, cfg: RouteConfig, order: Any = "lockstep") -> Any:
    """(a8, info, tables) of the first launch, which reads no weights."""
    nothing: Any = None
    return FlydslCall(InterpretedBackend(order=order), {"route": cfg}, x, nothing, ids.float(), ids).route()


@pytest.mark.parametrize("columns", extent([256, 7168], [256, 512, 7168]))
def test_quantized_rows_equal_the_reference(columns: int) -> None:
    x = special_rows(columns, torch.bfloat16)
    a8, info, _ = routed(x, torch.zeros(len(x), 1, dtype=torch.int32), RouteConfig(1, 1, 16, columns))
    expected, scale = quantize_rows(x)
    assert torch.equal(a8.float(), expected) and torch.equal(info[:, 1], low_sums(a8))
    assert torch.equal(info[:, 0].contiguous().view(torch.float32), scale[:, 0])


# Two and three steps of 4,096 slots: one or two workgroups with a share, the last one partly filled.
@pytest.mark.parametrize(
    "tokens,top_k,experts,tile_m,order",
    [
        (1, 8, 384, 16, "lockstep"),
        (33, 8, 384, 16, "forward"),
        (257, 8, 384, 32, "reverse"),
        (1500, 8, 300, 64, random.Random(7)),
        (5, 3, 6, 128, "lockstep"),
    ],
)
def test_the_sort_is_torchs(tokens: int, top_k: int, experts: int, tile_m: int, order: Any) -> None:
    g = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, experts + 40, generator=g).topk(top_k).indices.int()  # some beyond this rank's
    ids[ids % 7 == 3] = -1
    empty = torch.empty(tokens, 0, dtype=torch.bfloat16)
    places, blocks = routed(empty, ids, RouteConfig(experts, top_k, tile_m), order)[2]
    expected = route(ids, experts, tile_m)
    count = int(expected.num_blocks)
    wanted = [
        expected.block_expert,
        expected.block_first,
        expected.block_rows,
        torch.full_like(expected.block_rows, count),
    ]
    assert torch.equal(blocks[:count], torch.stack(wanted, 1)[:count]) and (blocks[count:, 2] == 0).all()
    here = int(expected.block_rows[:count].sum())
    slots = ids.flatten()[places[:here]]
    assert torch.equal(slots, slots.sort().values)  # by expert, in any order within
    assert torch.equal(places[:here].sort().values, expected.order[:here].sort().values)


@pytest.mark.parametrize("stage", [1, 2])
def test_rows_that_a_block_lacks_are_not_multiplied(stage: int) -> None:
    counts, shape = [], replace(SHAPE, hidden=1024 * stage)
    for rows in (1, 32, 33, 64):
        given = torch.randn(rows, shape.hidden).bfloat16(), torch.ones(rows, 2), torch.tensor([[2, -1]] * rows).int()
        made = call(shape, PREFILL, given)
        if stage == 1:
            check_stage1(made)
        else:
            check_stage2(made, made.route()[2], made.kernels["stage2"])
        counts.append(made.backend.ran["v_mfma_i32_16x16x32_i8"])
    assert counts[0] == counts[1] == counts[2] / 2 == counts[3] / 2 > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_reduction_skips_absent_slots(dtype: torch.dtype) -> None:
    """In two chunks of columns."""
    g, experts = torch.Generator().manual_seed(0), 5
    slots = torch.randn(6 * 8, 1024, generator=g).to(dtype)
    scale = torch.rand(48, generator=g)
    ids = torch.randint(-1, experts + 1, (6, 8), generator=g).int()
    here = (ids >= 0) & (ids < experts)
    ids[2], here[2] = -1, False
    info = torch.stack([scale.view(torch.int32), torch.zeros(48, dtype=torch.int32)], 1)
    slots.view(6, 8, -1)[~here] = float("nan")  # whatever lies in memory
    ids[4] = 0
    info[39, 0] = -1  # the NaN that rounding carries out of
    out, cfg = torch.zeros(6, 1024, dtype=torch.bfloat16), ReduceConfig(1024, 8, experts, dtype == torch.bfloat16)
    for column, part in ((0, slots[:, :640]), (640, slots[:, 640:])):
        given = ReduceArguments(part.contiguous(), info, ids, out, 6, column, part.shape[1])
        InterpretedBackend().launch(cfg, (6, part.shape[1]), given)
    weighted = torch.where(here[..., None], slots.float().view(6, 8, -1) * scale.view(6, 8, 1), 0.0)
    expected, got = weighted.sum(1), out.float()
    assert (got[2] == 0).all()
    assert got[4].isnan().all()  # whatever NaN a router weight is
    got[4], expected[4] = 0, 0
    assert (got - expected).norm() / expected.norm() < 2**-8


@pytest.mark.parametrize("tokens", extent([8, 160], [8, 160, 10240]))
def test_the_code_objects_that_serve_kimi(tokens: int) -> None:
    """Real hidden and intermediate size (TP 8) and the table's tiles: the same machine code, for two tokens."""
    kernels = FlydslBackend().configs(MoeShape(384, 7168, 256, 8), tokens)
    shape = MoeShape(6, 7168, 256, 8)
    ids = torch.full((2, 8), -1, dtype=torch.int32)  # top-8, on a rank that has three of the experts
    ids[0, 2], ids[0, 7], ids[1, 0] = 4, 0, 4
    given = special_rows(7168, torch.bfloat16)[:2], torch.rand(2, 8, generator=torch.Generator().manual_seed(1)), ids
    got = call_of(InterpretedBackend(), shape, given, kernels).run().double()
    expected = ReferenceBackend().forward(given[0], prepared(shape)[0], *given[1:]).double()
    assert (got - expected).norm() / expected.norm() < TOLERANCE

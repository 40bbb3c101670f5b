"""The compiled FlyDSL kernels, executed instruction by instruction, against torch."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.extent import extent

from kimi_w4a8_eagle3.gates import STAGE1_TILES
from kimi_w4a8_eagle3.moe.flydsl import toolchain as toolchain

SKIP = toolchain.flydsl_problem() or toolchain.linker_problem()
pytestmark = [pytest.mark.kernels, pytest.mark.skipif(SKIP is not None, reason=f"FlyDSL kernels: {SKIP}")]
ROUTINGS: tuple[str, ...] = ()
if SKIP is None:
    from flydsl_layers import EXPERTS, ROUTED, ROUTINGS, TOP_K, Layer, exact_sums, route_ids, special_rows
    from flydsl_machine import ORDERS, Device, info_of, tables_of
    from support.flydsl_layout import low_sums
    from support.packing import pack_reorder

    from kimi_w4a8_eagle3.moe.contract import MoeShape
    from kimi_w4a8_eagle3.moe.flydsl import layout as layout
    from kimi_w4a8_eagle3.moe.flydsl.backend import FlydslBackend
    from kimi_w4a8_eagle3.moe.flydsl.configs import Stage1Config, Stage2Config
    from kimi_w4a8_eagle3.moe.reference import quantize_rows
    from kimi_w4a8_eagle3.moe.routing import route
    from proof.assembly import assembly
    from proof.gfx942 import DataRace, MachineError, parse_kernel
    from proof.sums import Stage1Sums, Stage2Given, Stage2Sums, sums_of


def stage1_sums(cfg: Any, layer: Any, ids: torch.Tensor, order: Any = "lockstep") -> tuple[torch.Tensor, torch.Tensor]:
    rows = layer.rows(ids.shape[0], layer.hidden)
    info = info_of(rows, torch.ones(ids.shape[0]))
    got = Device(order).stage1(cfg, rows, info, layer.moe, route(ids, EXPERTS, cfg.tile_m))
    return got, exact_sums(layer.w13, rows, ids, per_slot=False)


def stage2_sums(cfg: Any, layer: Any, ids: torch.Tensor, order: Any = "lockstep") -> tuple[torch.Tensor, torch.Tensor]:
    rows = layer.rows(ids.numel(), layer.inter)
    info = info_of(rows, torch.ones(ids.numel()))
    got = Device(order).stage2(cfg, rows, info, layer.moe, route(ids, EXPERTS, cfg.tile_m))
    return got, exact_sums(layer.w2, rows, ids, per_slot=True).float()


TILES = ((16, 64, 256), (32, 32, 128), (64, 128, 128), (128, 64, 128))


# 5 and 7 chunks a wave: before, inside and after the rolled loop
@pytest.mark.parametrize("tile", extent(TILES, STAGE1_TILES))
def test_stage1_sums_are_exact(tile: tuple[int, int, int]) -> None:
    layer = Layer(2560 if tile[2] == 128 else 3584, 128)
    got, expected = stage1_sums(Stage1Sums(layer.hidden, 128, TOP_K, *tile), layer, route_ids("ragged"))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("tile", [(16, 64, 256), (16, 32, 128), (64, 128, 128)])
@pytest.mark.parametrize("hidden", extent([128, 512, 640], [128, 256, 512, 640, 1024, 1408, 1536]))
def test_stage1_short_k(tile: tuple[int, int, int], hidden: int) -> None:
    """Fewer chunks than the loop and the ring are made for, and waves whose last chunk is past the end."""
    layer = Layer(hidden, 128)
    got, expected = stage1_sums(Stage1Sums(hidden, 128, TOP_K, *tile), layer, route_ids("one token"))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("tile", TILES)
def test_stage1_ragged_routing(tile: tuple[int, int, int], kind: str) -> None:
    layer, by_xcd = Layer(1024, 256), tile[0] >= 64
    cfg = Stage1Sums(1024, 256, TOP_K, *tile, by_xcd=by_xcd)
    got, expected = stage1_sums(cfg, layer, route_ids(kind))
    assert torch.equal(got, expected)


STAGE2 = [  # inter, tile_m, tile_n, tile_k
    (128, 16, 128, 128), (256, 16, 128, 256), (256, 16, 256, 256), (256, 16, 512, 256), (256, 32, 256, 256),
    (512, 16, 256, 256), (512, 16, 256, 512), (512, 32, 128, 128), (1024, 16, 128, 512), (2048, 16, 256, 256),
    (256, 64, 1024, 256), (256, 64, 256, 128), (256, 128, 1024, 256), (512, 64, 1024, 256), (512, 128, 512, 256),
]  # fmt: skip


@pytest.mark.parametrize("inter,tile_m,tile_n,tile_k", extent(STAGE2[::3], STAGE2))
def test_stage2_sums_are_exact(inter: int, tile_m: int, tile_n: int, tile_k: int) -> None:
    layer = Layer(1024, inter)
    cfg = Stage2Sums(1024, inter, TOP_K, tile_m, tile_n, tile_k, given=True)
    got, expected = stage2_sums(cfg, layer, route_ids("absent slots"))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("tile", [(16, 256, 256), (64, 1024, 256)])
def test_stage2_ragged_routing(tile: tuple[int, int, int], kind: str) -> None:
    """The served form: float16 rows, equal for all tiles, also of a chunk of the channels."""
    layer, ids = Layer(2048, 256), route_ids(kind)
    cfg = Stage2Given(2048, 256, TOP_K, *tile, by_xcd=tile[0] >= 64)
    got, expected = stage2_sums(cfg, layer, ids)
    here = ids.flatten() >= 0
    scales = layer.moe.s2[ids.flatten()[here], :2048]
    assert torch.equal(got[here], nearest_half(expected[here] * scales))
    rows = layer.rows(ids.numel(), 256)
    routed = route(ids, EXPERTS, tile[0])
    info = info_of(rows, torch.ones(len(rows)))
    chunk = Device().stage2(cfg, rows, info, layer.moe, routed, 1024)
    assert torch.equal(chunk, got[:, 1024:])


def nearest_half(values: torch.Tensor) -> torch.Tensor:
    """Round to float16, ties away from zero."""
    below = (values.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)
    return torch.where(values.abs() < 2.0**-14, values.half().float(), below)


def test_extreme_values_stay_exact() -> None:
    """All weights -8 against rows of +-127: the largest sums that the float bias of stage 2 must hold."""
    layer = Layer(1024, 512)
    layer.w2.fill_(-8)
    layer.moe = replace(layer.moe, w2=layout.pack(pack_reorder(layer.w2), paired=True))
    ids = route_ids("one token")
    cfg = Stage2Sums(1024, 512, TOP_K, given=True)
    for value in (127, -127):
        rows = torch.full((TOP_K, 512), value, dtype=torch.int8)
        got = Device().stage2(cfg, rows, info_of(rows, torch.ones(TOP_K)), layer.moe, route(ids, EXPERTS, 16))
        assert (got == -8 * 512 * value).all()


@pytest.mark.parametrize(
    "order", ["forward", "reverse", "roundrobin", random.Random(3)], ids=["forward", "reverse", "roundrobin", "random"]
)
@pytest.mark.parametrize("tile", [(16, 64, 256), (64, 64, 128)])
def test_stage1_under_adversarial_wave_orders(tile: tuple[int, int, int], order: Any) -> None:
    layer = Layer(1024, 128)
    got, expected = stage1_sums(Stage1Sums(1024, 128, TOP_K, *tile), layer, route_ids("one token"), order)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("tile", [(16, 64, 256), (64, 64, 128)])
def test_a_missing_barrier_is_found(tile: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The public kernels' write-after-read race, planted: without one barrier some order fails."""
    cfg = Stage1Sums(1024, 128, TOP_K, *tile)
    text = assembly(cfg)
    lines = text.splitlines()
    for number in [n for n, line in enumerate(lines) if line.strip() == "s_barrier"]:
        broken = parse_kernel("\n".join([*lines[:number], "\ts_nop 0", *lines[number + 1 :]]))
        monkeypatch.setattr("flydsl_machine.compiled", lambda _, kernel=broken: kernel)
        layer, failed = Layer(1024, 128), False
        for order in ("forward", "reverse", "roundrobin"):
            try:
                got, expected = stage1_sums(cfg, layer, route_ids("one token"), order)
                failed = failed or not torch.equal(got, expected)
            except (DataRace, MachineError):
                failed = True
        assert failed, f"the barrier in line {number + 1} could be removed unnoticed"


@pytest.mark.parametrize(
    "right,wrong", [("0xf0f0f0f0,", "0xf0f0f070,"), ("0xf0f0f0f,", "0xf0f0f0e,"), ("v_mfma_i32_16x16x32_i8", None)]
)
def test_a_wrong_mask_or_operand_is_found(right: str, wrong: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = Stage1Sums(512, 128, TOP_K)
    text = assembly(cfg)
    assert right in text
    if wrong is None:  # swap the two operands of the first MFMA: rows and weights change places
        line = next(x for x in text.splitlines() if right in x)
        opcode, _, operands = line.strip().partition(" ")
        d, a, b, c = operands.split(", ")
        broken = text.replace(line, f"\t{opcode} {d}, {b}, {a}, {c}", 1)
    else:
        broken = text.replace(right, wrong, 1)
    kernel = parse_kernel(broken)
    monkeypatch.setattr("flydsl_machine.compiled", lambda _: kernel)
    got, expected = stage1_sums(cfg, Layer(512, 128), route_ids("ragged"))
    assert not torch.equal(got, expected)


@pytest.mark.parametrize("columns", extent([256, 7168], [256, 512, 7168]))
def test_quantized_rows_equal_the_reference(columns: int) -> None:
    x = special_rows(columns, torch.bfloat16)
    a8, scale, low_sum = Device().quantize(x)
    expected, expected_scale = quantize_rows(x)
    assert torch.equal(a8.float(), expected)
    assert torch.equal(scale, expected_scale[:, 0])
    assert torch.equal(low_sum, low_sums(a8))


# Two and three steps of 4,096 slots: one or two workgroups with a share, the last one partly filled.
@pytest.mark.parametrize(
    "tokens,top_k,experts,tile_m,order",
    [(1, 8, 384, 16, 0), (33, 8, 384, 16, 1), (257, 8, 384, 32, 2), (1500, 8, 300, 64, 3), (5, 3, 6, 128, 0)],
)
def test_the_sort_is_torchs(tokens: int, top_k: int, experts: int, tile_m: int, order: int) -> None:
    g = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, experts + 40, generator=g).topk(top_k).indices.int()  # some beyond this rank's
    ids[ids % 7 == 3] = -1
    places, blocks, *_ = Device(ORDERS[order]).route(torch.empty(tokens, 0, dtype=torch.bfloat16), ids, experts, tile_m)
    expected_places, expected = tables_of(route(ids, experts, tile_m))
    count = int(expected[0, 3])
    assert torch.equal(blocks[:count], expected[:count]) and (blocks[count:, 2] == 0).all()
    here = int(expected[:, 2].sum())
    slots = ids.flatten()[places[:here]]
    assert torch.equal(slots, slots.sort().values)  # by expert, in any order within
    assert torch.equal(places[:here].sort().values, expected_places[:here].sort().values)


# Four row tiles of a wave through LDS at once; one of each of two waves, twice.
@pytest.mark.parametrize(("inter", "order"), [(256, "reverse"), (512, "forward")])
def test_a_prefills_first_stage2_quantizes_for_the_others(inter: int, order: str) -> None:
    """It rounds as the reference does. NaN or Inf in a row gives it a NaN scale, so that only its token is NaN."""
    layer, ids = Layer(2048, inter), route_ids("absent slots").repeat(2, 1)
    slots, here = ids.numel(), ids.flatten() >= 0
    h = special_rows(inter, torch.float32)[torch.arange(slots) % 9]
    h[2, 17], h[41, 255], h[43, 0] = float("nan"), float("inf"), float("-inf")
    router = torch.rand(slots, generator=torch.Generator().manual_seed(0))
    first = Stage2Config(2048, inter, TOP_K, 64, 1024, 256, by_xcd=True)
    device, routed = Device(order), route(ids, EXPERTS, 64)
    got = device.stage2(first, h, router.clone(), layer.moe, routed)
    expected, scale = quantize_rows(h)
    whole = here & h.isfinite().all(1)
    assert torch.equal(device.kept[whole].float(), expected[whole]) and (device.kept[~here] == 0).all()
    assert torch.equal(device.info[whole, 1], low_sums(device.kept)[whole])
    found = device.info[:, 0].contiguous().view(torch.float32)
    assert torch.equal(found[whole], (scale[:, 0] * router)[whole] * layer.moe.s2[ids.flatten()[whole].long(), 2048])
    assert found[here & ~whole].isnan().all() and (~whole & here).sum() == 3
    after = Device().stage2(first, device.kept, device.info, layer.moe, routed, 1024)
    assert torch.equal(after[here], got[here][:, 1024:])


@pytest.mark.parametrize("stage", [1, 2])
def test_rows_that_a_block_lacks_are_not_multiplied(stage: int) -> None:
    tile = (64, 128, 128) if stage == 1 else (64, 1024, 256)
    hidden = 1024 * stage
    cfg: Any = (Stage1Config if stage == 1 else Stage2Given)(hidden, 256, TOP_K, *tile, by_xcd=True)
    cfg = sums_of(cfg) if stage == 1 else cfg  # as compiled above
    layer, counts = Layer(hidden, 256), []
    for rows in (1, 32, 33, 64):
        ids, device = torch.tensor([[2, -1]] * rows, dtype=torch.int32), Device()
        count = rows if stage == 1 else 2 * rows
        given = layer.rows(count, hidden if stage == 1 else 256)
        run = device.stage1 if stage == 1 else device.stage2
        run(cfg, given, info_of(given, torch.ones(count)), layer.moe, route(ids, EXPERTS, 64))
        counts.append(device.ran["v_mfma_i32_16x16x32_i8"])
    assert counts[0] == counts[1] == counts[2] / 2 == counts[3] / 2 > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_reduction_skips_absent_slots(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    slots = torch.randn(6 * 8, 1024, generator=g).to(dtype)
    scale = torch.rand(48, generator=g)
    ids = torch.randint(-1, EXPERTS + 1, (6, 8), generator=g).int()
    here = (ids >= 0) & (ids < EXPERTS)
    ids[2], here[2] = -1, False
    info = torch.stack([scale.view(torch.int32), torch.zeros(48, dtype=torch.int32)], 1)
    slots.view(6, 8, -1)[~here] = float("nan")  # whatever lies in memory
    ids[4] = 0
    info[39, 0] = -1  # the NaN that rounding carries out of
    got = Device().reduce(slots, info, ids).float()
    weighted = torch.where(here[..., None], slots.float().view(6, 8, -1) * scale.view(6, 8, 1), 0.0)
    expected = weighted.sum(1)
    assert (got[2] == 0).all()
    assert got[4].isnan().all()  # whatever NaN a router weight is
    got[4], expected[4] = 0, 0
    assert (got - expected).norm() / expected.norm() < 2**-8


@pytest.mark.parametrize("tokens", extent([160], [160, 10240]))
def test_the_code_objects_that_serve_kimi(tokens: int) -> None:
    """Real hidden and intermediate size (TP 8) and the table's tiles: the same machine code, for two tokens."""
    configs = FlydslBackend().configs(MoeShape(384, 7168, 256, 8), tokens)
    cfg1, cfg2 = configs["stage1"], configs["stage2"]
    layer = Layer(7168, 256, seed=tokens)
    ids = torch.full((2, 8), -1, dtype=torch.int32)  # top-8, on a rank that has three of the experts
    ids[0, 2], ids[0, 7], ids[1, 0] = 4, 0, 4
    rows = layer.rows(2, 7168)
    scale = torch.tensor([0.01, 0.02])
    routed = route(ids, EXPERTS, cfg1.tile_m)
    h = Device("reverse").stage1(cfg1, rows, info_of(rows, scale), layer.moe, routed)
    sums = torch.stack([(layer.w13[e].float() @ rows[t].float()) * scale[t] * layer.moe.s13[e] for t, e in ROUTED])
    expected = torch.nn.functional.silu(sums[:, :256]) * sums[:, 256:]
    slots = [2, 7, 8]
    assert (h[slots] - expected).norm() / expected.norm() < 1e-5

    rows = layer.rows(16, 256)
    h = rows * torch.tensor([0.01, 1e-21, 1e-30, 3.0]).repeat(4)[:, None] + 1e-3 * torch.rand(16, 256)
    h[7], router = h[7] * 1e-36, torch.arange(1, 17) / 16
    (rows, scales), info = quantize_rows(h), router.clone()
    h[9, 3] = float("nan")  # a row that no slot names
    device = Device("reverse")
    got = device.stage2(cfg2, h, info, layer.moe, routed)
    expected = scales[slots, 0] * router[slots] * layer.moe.s2[[e for _, e in ROUTED], 7168]
    assert torch.equal(info[slots], expected) and (info[[0, 1, 9]] == 0).all()
    if cfg2.keeps:
        after = Device("reverse").stage2(cfg2, device.kept, device.info, layer.moe, routed, 6144)
        assert torch.equal(after[slots], got[slots, 6144:])
    sums = [
        (layer.w2[e].float() @ rows[s].float()) * layer.moe.s2[e, :7168]
        for s, (_, e) in zip(slots, ROUTED, strict=True)
    ]
    assert torch.equal(got[slots], nearest_half(torch.stack(sums)))

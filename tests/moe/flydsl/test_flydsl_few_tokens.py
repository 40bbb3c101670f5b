"""The kernels for few tokens, executed: stage 1 that sorts and quantizes, stage 2 that adds a token's slots."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from kimi_w4a8_eagle3.moe.flydsl import toolchain as toolchain

SKIP = toolchain.flydsl_problem() or toolchain.linker_problem()
pytestmark = [pytest.mark.kernels, pytest.mark.skipif(SKIP is not None, reason=f"FlyDSL kernels: {SKIP}")]
if SKIP is None:
    from flydsl_layers import EXPERTS, ROUTED, TOP_K, Layer, exact_sums, route_ids, special_rows
    from flydsl_machine import Device

    from kimi_w4a8_eagle3.moe.contract import MoeShape
    from kimi_w4a8_eagle3.moe.flydsl.backend import FlydslBackend
    from kimi_w4a8_eagle3.moe.flydsl.configs import OWN_ROWS, ByTokenConfig, Stage1Config, Stage2Config
    from kimi_w4a8_eagle3.moe.reference import quantize_rows
    from kimi_w4a8_eagle3.moe.routing import route
    from proof.assembly import assembly
    from proof.gfx942 import DataRace, MachineError, parse_kernel
    from proof.sums import Stage1Sums


def own_stage1(
    n: int, layer: Any, ids: torch.Tensor, order: Any = "lockstep"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sums, what they should be, order, blocks) of stage 1 that sorts for itself."""
    cfg = Stage1Sums(layer.hidden, layer.inter, TOP_K, OWN_ROWS, n, 256, experts=EXPERTS)
    x = special_rows(layer.hidden, torch.bfloat16)[torch.arange(len(ids)) % 9]
    rows = quantize_rows(x)[0].to(torch.int8)
    return *Device(order).stage1_small(cfg, x, ids, layer.moe), exact_sums(layer.w13, rows, ids, per_slot=False)


@pytest.mark.parametrize(
    ("n", "kind", "order"), [(16, "ragged", "reverse"), (32, "one expert", 3), (32, "absent slots", "forward")]
)
def test_stage1_that_sorts(n: int, kind: str, order: str | int) -> None:
    ids = route_ids(kind)
    got, places, blocks, expected = own_stage1(n, Layer(512, 128), ids, wave_order(order))
    assert torch.equal(got, expected)
    slots = []
    for expert, first, rows, _ in blocks.tolist():
        mine = places[first : first + rows].tolist()
        assert all(ids.flatten()[slot] == expert for slot in mine) and len(mine) <= OWN_ROWS
        slots += mine
    assert sorted(slots) == (ids.flatten() >= 0).nonzero().flatten().tolist()
    used = sum(-(-int((ids == e).sum()) // OWN_ROWS) for e in range(EXPERTS))
    assert int((blocks[:, 2] > 0).sum()) == used  # no expert is read more often than its rows need


def test_stage1_that_sorts_takes_512_slots_and_long_rows() -> None:
    ids = torch.full((256, TOP_K), -1, dtype=torch.int32)
    ids[[0, 70, 200, 255, 255], [1, 0, 1, 0, 1]] = torch.tensor([2, 2, 2, 2, 0], dtype=torch.int32)
    got, _, _, expected = own_stage1(32, Layer(1536, 128), ids)
    assert torch.equal(got, expected)


def few_tokens(inter: int) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(layer, float32 rows, router weights, ids) of three tokens with four slots each."""
    g = torch.Generator().manual_seed(5)
    ids = torch.stack([torch.randperm(EXPERTS, generator=g)[:4] for _ in range(3)]).int()
    ids[1, 2], ids[2] = -1, -1
    h = torch.randn(12, inter, generator=g) * torch.tensor([1, 30, 1e-30, 1e-3]).repeat(3)[:, None]
    h[3] = 0
    h[6, 1] = float("nan")  # of a slot without an expert
    return Layer(512, inter), h, torch.rand(3, 4, generator=g), ids


def wave_order(order: str | int) -> Any:
    """A number is the seed of a random one."""
    return random.Random(order) if isinstance(order, int) else order


@pytest.mark.parametrize(("inter", "order"), [(128, "reverse"), (1024, 5)])
def test_stage2_by_token_has_the_bits_of_stage2_and_the_sum(inter: int, order: str | int) -> None:
    layer, h, router, ids = few_tokens(inter)
    got = Device(wave_order(order)).stage2_token(ByTokenConfig(512, inter, 4, EXPERTS), h, layer.moe, router, ids)
    assert torch.equal(got, in_two_launches(layer, h, router, ids))
    h[0, 5] = float("inf")
    got = Device().stage2_token(ByTokenConfig(512, inter, 4, EXPERTS), h, layer.moe, router, ids)
    assert got[0].isnan().all() and got[1:].isfinite().all() and (got[2] == 0).all()


def in_two_launches(layer: Any, h: torch.Tensor, router: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The same by the kernels for more tokens."""
    inter = h.shape[1]
    cfg = Stage2Config(512, inter, 4, tile_k=min(inter, 256))
    info = router.flatten().clone()
    slots = Device().stage2(cfg, h, info, layer.moe, route(ids, EXPERTS, 16))
    info = torch.stack([info.view(torch.int32), torch.zeros(12, dtype=torch.int32)], 1)
    return Device().reduce(slots.half(), info, ids, EXPERTS)


@pytest.mark.parametrize(("inter", "order"), [(256, "reverse"), (512, 3)])
def test_stage2_of_short_blocks_has_the_bits_of_long_ones(inter: int, order: str | int) -> None:
    layer, ids, g = Layer(512, inter), route_ids("absent slots"), torch.Generator().manual_seed(1)
    h, router = torch.randn(ids.numel(), inter, generator=g), torch.rand(ids.numel(), generator=g)
    routed = route(ids, EXPERTS, OWN_ROWS)
    listed = torch.full((routed.max_blocks, OWN_ROWS), ids.numel(), dtype=torch.int32)
    for block in range(int(routed.num_blocks)):
        first, rows = int(routed.block_first[block]), int(routed.block_rows[block])
        listed[block, :rows] = routed.order[first : first + rows]
    short = replace(routed, order=listed.flatten())
    found = []
    for cfg, tables in ((short_config(inter, True), short), (short_config(inter, False), route(ids, EXPERTS, 16))):
        info = router.clone()
        found.append((Device(wave_order(order)).stage2(cfg, h, info, layer.moe, tables), info))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def short_config(inter: int, short: bool) -> Stage2Config:
    return Stage2Config(512, inter, TOP_K, 16, 256, 256, short=short)


@pytest.mark.parametrize("kernel", ["stage 1 that sorts", "stage 2 by token"])
def test_a_missing_barrier_of_the_kernels_for_few_tokens_is_found(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.tensor([[2, -1]] * 4, dtype=torch.int32)  # one block with four rows

    def right(order: str) -> bool:
        if kernel == "stage 2 by token":
            layer, h, router, given = few_tokens(128)
            cfg = ByTokenConfig(512, 128, 4, EXPERTS)
            return torch.equal(Device(order).stage2_token(cfg, h, layer.moe, router, given), good)
        got, _, _, expected = own_stage1(32, Layer(512, 128), ids, order)
        return torch.equal(got, expected)

    good = in_two_launches(*few_tokens(128)) if kernel == "stage 2 by token" else None
    cfg: Any = ByTokenConfig(512, 128, 4, EXPERTS)
    if good is None:
        cfg = Stage1Sums(512, 128, TOP_K, OWN_ROWS, 32, 256, experts=EXPERTS)
    lines = assembly(cfg).splitlines()
    barriers = [n for n, line in enumerate(lines) if line.strip() == "s_barrier"]
    assert len(barriers) == (1 if good is not None else 2 * OWN_ROWS + 4)
    for number in barriers:
        broken = parse_kernel("\n".join([*lines[:number], "\ts_nop 0", *lines[number + 1 :]]))
        monkeypatch.setattr("flydsl_machine.compiled", lambda _, kernel=broken: kernel)
        try:
            found = not all(right(order) for order in ("forward", "reverse", "roundrobin"))
        except (DataRace, MachineError):
            found = True
        assert found, f"the barrier in line {number + 1} could be removed unnoticed"


def test_the_code_objects_that_serve_kimi_few_tokens() -> None:
    """Real sizes (TP 8) and the table's tiles: both launches, for two tokens with three experts of this rank."""
    configs = FlydslBackend().configs(MoeShape(384, 7168, 256, 8), 8)
    cfg1, cfg2 = configs["stage1"], configs["stage2"]
    assert isinstance(cfg1, Stage1Config) and isinstance(cfg2, ByTokenConfig)
    layer = Layer(7168, 256)
    ids = torch.full((2, 8), -1, dtype=torch.int32)
    ids[0, 2], ids[0, 7], ids[1, 0] = 4, 0, 4
    x = special_rows(7168, torch.bfloat16)[:2]
    h = Device("reverse").stage1_small(cfg1, x, ids, layer.moe)[0]
    rows, scale = quantize_rows(x)
    sums = torch.stack([(layer.w13[e].float() @ rows[t]) * scale[t] * layer.moe.s13[e] for t, e in ROUTED])
    expected = torch.nn.functional.silu(sums[:, :256]) * sums[:, 256:]
    assert (h[[2, 7, 8]] - expected).norm() / expected.norm() < 1e-5
    router = torch.rand(2, 8, generator=torch.Generator().manual_seed(1))
    got = Device("reverse").stage2_token(cfg2, h, layer.moe, router, ids).float()
    total = torch.zeros(2, 7168)
    for slot, (t, e) in zip((2, 7, 8), ROUTED, strict=True):
        rows, scale = quantize_rows(h[slot : slot + 1])
        unit = layer.moe.s2[e, 7168]
        total[t] += (layer.w2[e].float() @ rows[0]) * layer.moe.s2[e, :7168] * unit * scale[0] * router.flatten()[slot]
    assert (got - total).norm() / total.norm() < 2**-8

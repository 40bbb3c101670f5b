"""Run by test_triton_interpreter.py in a process of its own: Triton reads TRITON_INTERPRET when it is imported."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton.language as tl
from support.far_blocks import FarLayer
from triton.runtime import interpreter

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.moe.contract import MoeShape, QuarkMoeWeights
from kimi_w4a8_eagle3.moe.op import MoeLayer
from kimi_w4a8_eagle3.moe.reference import ReferenceBackend, integers
from kimi_w4a8_eagle3.moe.routing import empty_routing, route
from kimi_w4a8_eagle3.moe.triton import kernels as kernels
from kimi_w4a8_eagle3.moe.triton.backend import MoeCall, StageTile, TritonBackend, TritonTiles
from kimi_w4a8_eagle3.quark.packing import unpack_reorder
from kimi_w4a8_eagle3.quark.weight_format import MXFP4
from kimi_w4a8_lab.kernels.agreement import KnownLayer, agreements
from kimi_w4a8_lab.kernels.random_layers import random_layer

# Triton makes both anew for each operation of each program, with a table of all kinds: a third of the time here.
NUMPY_TYPES: dict[str, Any] = {}
BLOCK_TYPES: dict[tuple[Any, ...], tl.block_type] = {}
_numpy_type = interpreter._get_np_dtype


def numpy_type(kind: Any) -> Any:
    if (name := kind.scalar.name) not in NUMPY_TYPES:
        NUMPY_TYPES[name] = _numpy_type(kind)
    return NUMPY_TYPES[name]


def block_type(element: tl.dtype, shape: tuple[int, ...]) -> tl.block_type:
    if (key := (element.name, *shape)) not in BLOCK_TYPES:
        BLOCK_TYPES[key] = tl.block_type(element, shape)
    return BLOCK_TYPES[key]


interpreter._get_np_dtype = numpy_type
interpreter.InterpreterBuilder.get_block_ty = lambda self, element, shape: block_type(element, shape)
tl.block_type.with_element_ty = lambda self, element: block_type(element, self.shape)

# For which functions' globals the language is replaced while a kernel runs. Triton looks through the whole language
# again whenever a kernel calls a function, which is a third of the time here.
REPLACED: set[int] = set()
_launch, _replace = interpreter.GridExecutor.__call__, interpreter._patch_lang


def launch(self: Any, *args: Any, **kwargs: Any) -> None:
    REPLACED.clear()
    _launch(self, *args, **kwargs)


def call(self: Any, *args: Any, **kwargs: Any) -> Any:
    if id(self.fn.__globals__) not in REPLACED:
        REPLACED.add(id(self.fn.__globals__))
        _replace(self.fn)
    return self.rewrite()(*args, **kwargs)


interpreter.GridExecutor.__call__ = launch
interpreter.InterpretedFunction.__call__ = call

CPU = torch.device("cpu")
SHAPE = MoeShape(num_experts=5, hidden=144, inter=80, top_k=3)  # tails in K and N for every tile below
TILES = {
    "separate quantization": TritonTiles(16, StageTile(32, 64, 4, 2), StageTile(64, 32, 4, 2), 1),
    "fused quantization": TritonTiles(16, StageTile(128, 32, 4, 2), StageTile(32, 64, 4, 2), 1),
    "column chunks": TritonTiles(16, StageTile(64, 128, 4, 2), StageTile(64, 64, 4, 2), 0),
    "32 rows": TritonTiles(32, StageTile(32, 128, 4, 2), StageTile(128, 64, 4, 2), 1),
}


def batch(shape: MoeShape, ids: torch.Tensor, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(ids), shape.hidden, generator=generator).bfloat16()
    return x, torch.rand(ids.shape, generator=generator), ids.int()


def random_ids(tokens: int, seed: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(SHAPE.num_experts, generator=generator)[: SHAPE.top_k] for _ in range(tokens)])


ROUTINGS = {
    "one token": torch.tensor([[4, 0, 2]]),
    "every expert": random_ids(9),
    "one expert takes all": torch.full((19, 3), 3),
    "slots elsewhere": torch.where(torch.arange(33).view(11, 3) % 4 == 1, -1, random_ids(11)),
    "nothing here": torch.full((2, 3), -1),
}


@pytest.fixture(scope="module")
def layer() -> QuarkMoeWeights:
    return random_layer(SHAPE, CPU)


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_forward_agrees_with_the_reference(layer: QuarkMoeWeights, tiles: str, routing: str) -> None:
    x, weights, ids = batch(SHAPE, ROUTINGS[routing])
    backend, reference = TritonBackend(TILES[tiles]), ReferenceBackend()
    out = backend.forward(x, backend.prepare(layer), weights, ids)
    expected = reference.forward(x, reference.prepare(layer), weights, ids)
    assert out.dtype == torch.bfloat16 and out.shape == expected.shape
    if routing == "nothing here":
        assert not out.any()
    else:
        assert (out.float() - expected.float()).norm() / expected.float().norm() < 2e-3


def test_it_passes_the_gpu_checks_of_kimi_accept() -> None:
    (found,) = agreements(TritonBackend(TILES["separate quantization"]), SHAPE, [3], CPU)
    assert found.worst > 0


MX_SHAPE = MoeShape(5, 192, 64, 3, weights=MXFP4)  # tails in K and N


@pytest.mark.parametrize(("tiles", "nvidia"), [("separate quantization", True), ("column chunks", False)])
def test_mxfp4_is_exact_for_every_shift(tiles: str, nvidia: bool) -> None:
    layer, (x, weights, ids) = random_layer(MX_SHAPE, CPU), batch(MX_SHAPE, ROUTINGS["one token"])
    call = MoeCall(x, TritonBackend().prepare(layer), weights, ids, TILES[tiles], nvidia=nvidia)
    q, scale, blocks = call.quantize_and_route()
    order = blocks.order.long()
    w13 = integers(layer.w13, layer.shift13).long()[ids.reshape(-1).long()[order]]
    acc, _ = call.stage1(q, scale, blocks, mode="acc")
    assert torch.equal(acc.long(), torch.einsum("k,snk->sn", q[0].long(), w13))
    known = KnownLayer(MX_SHAPE, CPU)
    inputs, answer = known.batch(2, seed=1)
    backend = TritonBackend(TILES[tiles])
    assert torch.equal(backend.forward(inputs[0], backend.prepare(known.weights), *inputs[1:]), answer)


@pytest.mark.parametrize(("span", "tiles"), [(12, "column chunks"), (13, "32 rows"), (20, "fused quantization")])
def test_mxfp4_rows_of_many_octaves_are_the_values_of_the_files(span: int, tiles: str) -> None:
    layer, backend = FarLayer(MoeShape(3, 128, 64, 2, weights=MXFP4), span), TritonBackend(TILES[tiles])
    x, router, ids = layer.batch
    moe, reference = backend.prepare(layer.weights), ReferenceBackend()
    assert moe.more is not None and moe.more.w13 is moe.w13  # the codes are there once
    found = backend.forward(x, moe, router, ids)
    assert float(layer.errors(found).max()) < 4e-3
    assert torch.equal(backend.forward(x[2:], moe, router[2:], ids[2:]), found[2:])
    ids[1, 0], x[3, 40] = -1, float("nan")
    found, expected = (
        backend.forward(x, moe, router, ids),
        reference.forward(x, reference.prepare(layer.weights), router, ids),
    )
    assert found[3].isnan().all() and (found[:3] - expected[:3]).float().norm() < 4e-3 * expected[:3].float().norm()


@pytest.mark.parametrize("nvidia", [False, True], ids=["weights right", "weights left"])
@pytest.mark.parametrize("tiles", TILES)
def test_accumulators_are_exact(layer: QuarkMoeWeights, tiles: str, nvidia: bool) -> None:
    x, weights, ids = batch(SHAPE, ROUTINGS["slots elsewhere"])
    call = MoeCall(x, TritonBackend().prepare(layer), weights, ids, TILES[tiles], nvidia=nvidia)
    q, scale, blocks = call.quantize_and_route()
    flat = ids.reshape(-1).long()
    order = blocks.order.long()
    order = order[: int((flat >= 0).sum())]
    experts, tokens = flat[order], order // SHAPE.top_k

    acc, _ = call.stage1(q, scale, blocks, mode="acc")
    w13 = unpack_reorder(layer.w13).long()
    assert torch.equal(acc[: len(order)].long(), torch.einsum("sk,snk->sn", q[tokens].long(), w13[experts]))

    act, _ = call.stage1(q, scale, blocks)
    acc = torch.zeros(ids.numel(), SHAPE.hidden, dtype=torch.int32)
    call.stage2(act, blocks, acc, 0, SHAPE.hidden, mode="acc")
    w2 = unpack_reorder(layer.w2).long()
    assert torch.equal(acc[order].long(), torch.einsum("sk,snk->sn", act[: len(order)].long(), w2[experts]))


def test_extreme_values_do_not_overflow() -> None:
    """|a8| = 127 and w4 = -8 throughout, at the real K: the largest accumulator there is, times 16."""
    shape = MoeShape(num_experts=1, hidden=7168, inter=16, top_k=1)
    eights = torch.full((1, 32, 896), 0x88888888 - 2**32, dtype=torch.int64).int()
    layer = replace(random_layer(shape, CPU), w13=eights)
    x, weights, ids = batch(shape, torch.zeros(1, 1))
    call = MoeCall(torch.ones_like(x), TritonBackend().prepare(layer), weights, ids, TILES["column chunks"])
    acc, _ = call.stage1(*call.quantize_and_route(), mode="acc")
    assert (acc == 7168 * 127 * -8).all()


def test_the_largest_row_of_stage_2_fits_float16_whatever_the_scales() -> None:
    """Every activation 127 and every weight -8, in both stages; scales as large as float32 bears."""
    layer = random_layer(SHAPE, CPU)
    eights = {name: torch.full_like(getattr(layer, name), 0x88888888 - 2**32) for name in ("w13", "w2")}
    layer = replace(layer, **eights, s13=torch.full_like(layer.s13, 0.01), s2=torch.full_like(layer.s2, 1e20))
    x, weights, ids = batch(SHAPE, ROUTINGS["every expert"])
    backend, reference = TritonBackend(TILES["fused quantization"]), ReferenceBackend()
    out = backend.forward(torch.ones_like(x), backend.prepare(layer), weights, ids)
    expected = reference.forward(torch.ones_like(x), reference.prepare(layer), weights, ids)
    out, expected = out.double(), expected.double()  # squares of 1e28 overflow float32
    assert (out - expected).norm() / expected.norm() < 2e-3


def test_a_token_does_not_depend_on_batch_or_tiles(layer: QuarkMoeWeights) -> None:
    x, weights, ids = batch(SHAPE, random_ids(21))
    outputs = [
        TritonBackend(tiles).forward(x, TritonBackend().prepare(layer), weights, ids) for tiles in TILES.values()
    ]
    alone = TritonBackend(TILES["32 rows"]).forward(x[4:5], TritonBackend().prepare(layer), weights[4:5], ids[4:5])
    assert all(torch.equal(out, outputs[0]) for out in outputs)
    assert torch.equal(alone, outputs[0][4:5])


def test_a_broken_activation_breaks_its_own_token_only(layer: QuarkMoeWeights) -> None:
    x, weights, ids = batch(SHAPE, random_ids(6))
    backend = TritonBackend(TILES["separate quantization"])
    clean = backend.forward(x, backend.prepare(layer), weights, ids)
    x[1, 7], x[2, -1], x[4, 0] = float("nan"), float("inf"), float("-inf")
    out = backend.forward(x, backend.prepare(layer), weights, ids)
    assert out[[1, 2, 4]].isnan().all()
    assert torch.equal(out[[0, 3, 5]], clean[[0, 3, 5]])


def test_no_tokens(layer: QuarkMoeWeights) -> None:
    x, weights, ids = batch(SHAPE, torch.empty(0, 3))
    assert TritonBackend().forward(x, TritonBackend().prepare(layer), weights, ids).shape == (0, SHAPE.hidden)


def test_the_operator_passes_everything_the_kernels_need(layer: QuarkMoeWeights) -> None:
    x, weights, ids = batch(SHAPE, ROUTINGS["every expert"])
    backend = TritonBackend(TILES["column chunks"])
    moe = MoeLayer(backend, layer)
    assert torch.equal(moe(x, weights, ids), backend.forward(x, moe.prepared, weights, ids))


def test_mismatched_arguments_are_refused(layer: QuarkMoeWeights) -> None:
    x, weights, ids = batch(SHAPE, ROUTINGS["every expert"])
    backend = TritonBackend()
    with pytest.raises(KimiError, match="layout"):
        backend.forward(x, ReferenceBackend().prepare(layer), weights, ids)


def test_rows_are_quantized_as_the_contract_says() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(6, 100, generator=generator)
    x[0] = 0
    x[2] = torch.arange(100) / 2 - 24.0
    x[2, 0] = 127.0  # scale exactly 1: every second value is a tie
    x[3] = x[3] * 1e-30
    expected_scale = x.abs().amax(1) / 127
    expected_scale[0] = 1
    values, scale = quantize(x)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(values, torch.round(x / expected_scale[:, None]).to(torch.int8))
    assert values.abs().max() == 127


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_and_route` on float32 rows, without routing."""
    rows, k = x.shape
    q, scale, unused = torch.empty(rows, k, dtype=torch.int8), torch.empty(rows), torch.zeros(1, dtype=torch.int32)
    constants = {"H": k, "HP": 128, "TOP_K": 1, "E": 1, "EP": 2, "SP": 32, "BM": 16, "ROUTE": False}
    kernels.quantize_and_route[(rows,)](x, q, scale, *[unused] * 6, rows, **constants)
    return q, scale


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_kernel_routes_like_torch(routing: str, block_m: int) -> None:
    ids = ROUTINGS[routing].int()
    tiles = replace(TILES["separate quantization"], block_m=block_m)
    x, weights, ids = batch(SHAPE, ids)
    _, _, got = MoeCall(x, TritonBackend().prepare(random_layer(SHAPE, CPU)), weights, ids, tiles).quantize_and_route()
    expected = route(ids, SHAPE.num_experts, block_m)
    used = int(expected.num_blocks)
    assert torch.equal(got.order, expected.order) and int(got.num_blocks) == used
    assert got.max_blocks == expected.max_blocks == empty_routing(ids.numel(), 5, block_m, ids.device).max_blocks
    for name in ("block_expert", "block_first", "block_rows"):
        assert torch.equal(getattr(got, name)[:used], getattr(expected, name)[:used]), name

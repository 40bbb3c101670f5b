"""The FlyDSL backend: whole forwards through the interpreter, tile choice, gates, errors, compilation cache."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.gates import tile_gate
from kimi_w4a8_eagle3.moe.contract import MoeShape, QuarkMoeWeights
from kimi_w4a8_eagle3.moe.flydsl import toolchain as toolchain
from kimi_w4a8_eagle3.moe.tiles import buckets

SKIP = toolchain.flydsl_problem() or toolchain.linker_problem()
pytestmark = [pytest.mark.kernels, pytest.mark.skipif(SKIP is not None, reason=f"FlyDSL kernels: {SKIP}")]
if SKIP is None:
    from flydsl_machine import Device, compiled
    from support.packing import pack_reorder

    from kimi_w4a8_eagle3.moe.agreement import agreements
    from kimi_w4a8_eagle3.moe.flydsl import stage1 as stage1
    from kimi_w4a8_eagle3.moe.flydsl.backend import FlydslBackend, FlydslTiles
    from kimi_w4a8_eagle3.moe.flydsl.warm import warm
    from kimi_w4a8_eagle3.moe.reference import ReferenceBackend
    from kimi_w4a8_eagle3.quark.packing import unpack_reorder

KIMI = {tp: MoeShape(384, 7168, 2048 // tp, 8) for tp in (4, 8)}
SMALL = MoeShape(num_experts=6, hidden=1024, inter=256, top_k=3)


def interpreted(**gates: Any) -> FlydslBackend:
    """The backend with launches executed by the interpreter on copies of the tensors."""

    class Interpreted(FlydslBackend):
        def launch(self, build: Any, config: Any, *args: torch.Tensor | int) -> None:
            device = Device()
            kernel = compiled(config)
            buffers = [device.put(a) if isinstance(a, torch.Tensor) else a for a in args[: len(kernel.args)]]
            device.launch(config, config.grid(args[-1]), *buffers)
            for tensor, buffer in zip(args, buffers, strict=False):
                if isinstance(tensor, torch.Tensor):
                    tensor.copy_(device.get(buffer, tensor.dtype))

    return Interpreted(gates)


def layer(shape: MoeShape, seed: int = 0) -> QuarkMoeWeights:
    g = torch.Generator().manual_seed(seed)
    e, h, i = shape.num_experts, shape.hidden, shape.inter
    w13 = torch.randint(-8, 8, (e, 2 * i, h), generator=g).to(torch.int8)
    w2 = torch.randint(-8, 8, (e, h, i), generator=g).to(torch.int8)
    scales = (torch.rand(e, n, generator=g) * 4e-3 + 1e-4 for n in (2 * i, h))
    return QuarkMoeWeights(shape, pack_reorder(w13), pack_reorder(w2), *scales)


def batch(shape: MoeShape, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, shape.hidden, generator=g).bfloat16()
    ids = torch.stack([torch.randperm(shape.num_experts, generator=g)[: shape.top_k] for _ in range(tokens)]).int()
    return x, torch.rand(ids.shape, generator=g), ids


GATES = [
    {},
    {"AITER_FLYDSL_MOE_GRID_TRIM": False},
    {"FLYDSL_MOE_STAGE1_SCHED": False, "FLYDSL_MOE_STAGE2_SCHED": False, "AITER_FLYDSL_STAGE2_TILE_K": 128},
    {"AITER_FLYDSL_STAGE1_TILE_M": 64, "AITER_FLYDSL_STAGE1_TILE_N": 64},
    {"AITER_FLYDSL_STAGE2_TILE_M": 32, "AITER_FLYDSL_STAGE2_TILE_N": 128},
]


@pytest.mark.parametrize("gates", GATES, ids=lambda g: ",".join(g) or "none")
def test_forward_matches_the_reference(gates: dict[str, Any]) -> None:
    weights, (x, router, ids) = layer(SMALL), batch(SMALL, 7)
    ids[2, 1] = -1
    backend, reference = interpreted(**gates), ReferenceBackend()
    got = backend.forward(x, backend.prepare(weights), router, ids)
    expected = reference.forward(x, reference.prepare(weights), router, ids).float()
    assert got.dtype == torch.bfloat16 and got.shape == x.shape
    assert (got.float() - expected).norm() / expected.norm() < 4e-3


@pytest.mark.parametrize("gates", [{}, {"AITER_FLYDSL_STAGE1_TILE_M": 64, "AITER_FLYDSL_STAGE1_TILE_N": 64}])
def test_it_passes_what_kimi_accept_asks_on_a_gpu(gates: dict[str, Any]) -> None:
    """Decode tiles, and prefill tiles that add atomically."""
    (found,) = agreements(interpreted(**gates), SMALL, [7], torch.device("cpu"))
    assert found.worst > 0


@pytest.mark.parametrize("tokens", [5, 40])
def test_the_w4a16_baseline(tokens: int) -> None:
    """No quantized activations: plain matrix products, with the roundings to bfloat16 that the baseline has."""
    weights, (x, router, ids) = layer(SMALL), batch(SMALL, tokens)
    ids[2, 1] = -1
    backend = interpreted(FLYDSL_W4A16_HYBRID="w2_bf16", AITER_FLYDSL_STAGE1_TILE_M=64 if tokens > 5 else None)
    got = backend.forward(x, backend.prepare(weights), router, ids).float()
    w13 = unpack_reorder(weights.w13).double() * weights.s13[..., None]
    w2 = unpack_reorder(weights.w2).double() * weights.s2[..., None]
    expected = torch.zeros(tokens, SMALL.hidden, dtype=torch.double)
    for t, s in (ids >= 0).nonzero().tolist():
        gate, up = (w13[ids[t, s]] @ x[t].double()).chunk(2)
        h = (torch.nn.functional.silu(gate) * up).bfloat16().double()
        expected[t] += (w2[ids[t, s]] @ h) * router[t, s]
    assert (got - expected).norm() / expected.norm() < 4e-3


def test_a_broken_token_is_nan_and_its_neighbours_are_not() -> None:
    weights, (x, router, ids) = layer(SMALL), batch(SMALL, 3)
    backend = interpreted()
    moe = backend.prepare(weights)
    clean = backend.forward(x, moe, router, ids)
    x[1, 5] = float("nan")
    got = backend.forward(x, moe, router, ids)
    assert got[1].isnan().all() and torch.equal(got[[0, 2]], clean[[0, 2]])


def test_no_tokens() -> None:
    backend = interpreted()
    x, router, ids = batch(SMALL, 1)
    out = backend.forward(x[:0], backend.prepare(layer(SMALL)), router[:0], ids[:0])
    assert out.shape == (0, SMALL.hidden) and out.dtype == torch.bfloat16


@pytest.mark.parametrize("tp", KIMI)
def test_every_row_of_the_table_has_a_kernel_for_kimi(tp: int) -> None:
    backend = FlydslBackend()
    assert backend.shape_problem(KIMI[tp]) is None
    for tokens in [*buckets("flydsl"), 1, 8, 160, 10240]:
        configs = backend.configs(KIMI[tp], tokens)
        assert configs["stage2"][1].atomic == ("reduce" not in configs)
        assert tokens > 1024 or configs["stage1"][1].tile_k == 256  # decode's default


@pytest.mark.parametrize(
    "gates,message",
    [
        ({"AITER_FLYDSL_STAGE2_TILE_K": 64}, "tile_k 64"),
        ({"AITER_FLYDSL_STAGE1_TILE_N": 256}, r"no kernel for tile .*256"),
        ({"AITER_FLYDSL_STAGE1_TILE_M": 48}, r"no kernel for tile .*48"),
        ({"AITER_FLYDSL_STAGE1_TILE_M": 16, "AITER_FLYDSL_STAGE2_TILE_M": 64}, "share their blocks"),
    ],
)
def test_env_tiles_that_do_not_fit_are_errors(gates: dict[str, Any], message: str) -> None:
    with pytest.raises(KimiError, match=message):
        FlydslBackend(gates).configs(KIMI[8], 8)
    with pytest.raises(KimiError, match=message):  # the automatic choice does not go on to Triton
        FlydslBackend(gates).shape_problem(KIMI[8])


def test_a_plan_is_made_once_for_all_batches_of_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, shape = interpreted(), SMALL
    made = []
    monkeypatch.setattr(FlydslBackend, "configs_of", lambda self, shape, tiles: made.append(tiles) or {})
    assert backend.configs(shape, 1) is backend.configs(shape, 64) is not backend.configs(shape, 65)
    backend.configs(replace(shape, inter=512), 64)  # another shape has a plan of its own
    assert [tiles.stage1 for tiles in made] == [(32, 256), (64, 256), (32, 256)]


def test_each_stage_has_its_own_gates() -> None:
    """Each axis of each stage, and no other, follows its gate."""
    usual = FlydslBackend().tiles_for(KIMI[4], 8)
    for stage, axis in ((1, "N"), (1, "K"), (2, "N"), (2, "K")):
        n, k = usual.stage1 if stage == 1 else usual.stage2
        expected = replace(usual, **{f"stage{stage}": (512, k) if axis == "N" else (n, 512)})
        assert FlydslBackend({tile_gate(stage, axis): 512}).tiles_for(KIMI[4], 8) == expected
    for stage in (1, 2):
        assert FlydslBackend({tile_gate(stage, "M"): 32}).tiles_for(KIMI[4], 8).tile_m == 32


@pytest.mark.parametrize(
    "shape,message",
    [
        (MoeShape(8, 7168 + 128, 256, 8), "hidden size 7296"),
        (MoeShape(8, 7168, 200, 8), "200"),
        (MoeShape(8, 7168, 2048, 8), "intermediate size 2048"),
    ],
)
def test_shapes_without_a_tile_say_why(shape: MoeShape, message: str) -> None:
    problem = FlydslBackend().shape_problem(shape)
    assert problem is not None and message in problem
    assert FlydslBackend({"AITER_FLYDSL_STAGE2_TILE_K": 64}).shape_problem(shape) is not None  # not for its gates


def test_other_devices_and_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "needs a gfx942 GPU" in str(FlydslBackend().unsupported(SMALL, torch.device("cpu")))
    monkeypatch.setattr(toolchain.metadata, "version", lambda name: "9.9.9")
    assert "9.9.9 is not supported" in str(toolchain.flydsl_problem())


def test_the_wheels_linker_comes_before_rocms_and_rocms_before_debians(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rocm, debian = tmp_path / "rocm", tmp_path / "bin" / "ld.lld-19"
    for linker in (rocm / "llvm" / "bin" / "ld.lld", debian):
        linker.parent.mkdir(parents=True)
        linker.write_text("#!/bin/sh\necho $0 $*\n")
        linker.chmod(0o755)
    monkeypatch.setenv("ROCM_PATH", str(rocm))
    monkeypatch.setenv("PATH", str(debian.parent), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def version() -> str:
        command = [toolchain.rocm_path() / "llvm" / "bin" / "ld.lld", "--version"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    if find_spec("ziglang"):
        assert version().startswith("LLD ")
        monkeypatch.setattr(toolchain, "find_spec", lambda name: None)
    assert version() == f"{rocm}/llvm/bin/ld.lld --version\n" and toolchain.rocm_path() == rocm
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    assert version() == f"{debian} --version\n"


def test_a_missing_linker_is_one_clear_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(toolchain, "find_spec", lambda name: None)
    with pytest.raises(KimiError, match=r"package ziglang .* and Debian's ld.lld-19 are all missing") as error:
        toolchain.rocm_path()
    assert error.value.remedy == "pip install 'kimi-w4a8-eagle3[kernels]'"


def test_inputs_of_the_wrong_kind_are_refused() -> None:
    backend = interpreted()
    x, router, ids = batch(SMALL, 2)
    moe = backend.prepare(layer(SMALL))
    with pytest.raises(KimiError, match="topk_ids"):
        backend.forward(x, moe, router, ids.long())
    other = ReferenceBackend().prepare(layer(SMALL))
    with pytest.raises(KimiError, match="layout"):
        backend.forward(x, other, router, ids)


def test_flydsl_caches_configurations_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """FlyDSL's own cache key holds no dataclass: without the tag, two tiles would share one kernel."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for tile_n in (32, 64):
        toolchain.compile_ahead(stage1.build(stage1.Stage1Config(512, 128, 2, 16, tile_n)))
    assert len(list(tmp_path.rglob("*.pkl"))) == 2
    toolchain.compile_ahead(stage1.build(stage1.Stage1Config(512, 128, 2, 16, 32)))
    assert len(list(tmp_path.rglob("*.pkl"))) == 2


def test_warm_refuses_another_gpu() -> None:
    with pytest.raises(KimiError, match="gfx942, not sm_90"):
        warm(KIMI[8], "sm_90")


def test_a_malformed_table_row_is_an_error() -> None:
    with pytest.raises(KimiError, match="malformed"):
        FlydslTiles.from_row({"tile_m": 16, "stage1": [32]})
    row = {"tile_m": 16, "stage1": [32, 256], "stage2": [256, 256], "atomic": False}
    assert FlydslTiles.from_row(row).to_row() == row


def test_the_sorting_kernel_routes_like_torch() -> None:
    """In a process of its own: Triton's interpreter is chosen when Triton is imported."""
    program = """
import torch
from kimi_w4a8_eagle3.moe.flydsl.route_slots import route_slots
from kimi_w4a8_eagle3.moe.routing import route
ids = torch.randint(-1, 9, (11, 3), generator=torch.Generator().manual_seed(0)).int()
got, expected = route_slots(ids, 7, 4), route(ids, 7, 4)
blocks = int(expected.num_blocks)
assert int(got.num_blocks) == blocks > 3
for name in ("block_expert", "block_first", "block_rows"):
    assert torch.equal(getattr(got, name)[:blocks], getattr(expected, name)[:blocks]), name
rows = int(expected.block_rows[:blocks].sum())
assert torch.equal(got.order[:rows], expected.order[:rows])
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=120)


def test_the_sorting_kernel_compiles_without_a_gpu() -> None:
    pytest.importorskip("triton")
    from kimi_w4a8_eagle3.moe.flydsl.route_slots import compile_routes

    assert compile_routes(SMALL.num_experts, [(12, 16), (9, 16), (4096, 16)]) == 1

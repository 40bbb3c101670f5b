"""FlydslBackend.forward as it serves: code objects of a folder, launched through HIP, where only the chip is missing.

From the manifest to hipModuleLaunchKernel the host code is the real one. What it launches, with the bytes it passes,
runs in the gfx942 interpreter on the very tensors (support/hip_standin.py), and the result is the reference's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from support.extent import extent
from support.hip_standin import InterpretedGpu, code_object, load_library

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.moe.contract import MoeShape, PreparedMoe, QuarkMoeWeights
from kimi_w4a8_eagle3.moe.flydsl import backend as flydsl_backend
from kimi_w4a8_eagle3.moe.flydsl import objects as flydsl_objects
from kimi_w4a8_eagle3.moe.flydsl.backend import FlydslBackend
from kimi_w4a8_eagle3.moe.flydsl.configs import ByTokenConfig, KernelConfig, RouteConfig, Stage1Config, Stage2Config
from kimi_w4a8_eagle3.moe.flydsl.kernels.code_object import describe
from kimi_w4a8_eagle3.moe.flydsl.kernels.launcher import launcher_of
from kimi_w4a8_eagle3.moe.reference import ReferenceBackend
from kimi_w4a8_eagle3.quark.packing import unpack_reorder
from kimi_w4a8_lab.kernels.agreement import agreements
from kimi_w4a8_lab.kernels.random_layers import random_batch, random_layer
from proof.assembly import assembly
from proof.interpreted import parsed

pytestmark = pytest.mark.kernels

CPU = torch.device("cpu")
SHAPES = {tp: MoeShape(num_experts=12, hidden=512, inter=2048 // tp, top_k=8) for tp in (4, 8)}
STREAM = 0x7F00_1234_5678
# The mean error of one rounding to bfloat16, of values with any mantissa: ulp / sqrt(12) and E[1 / m^2] = 3 / (8 ln 2).
# The result's own rounding is the reference's, too: two sums that differ by d round differently in |d| / ulp of all
# cases, so that the mean square error is E|d| * E[ulp]. Here d comes from eight slots' rounding to float16, 2^-10 *
# 0.735 / sqrt(12) of the result: E|d| * E[ulp] = 0.8 * 2.1e-4 * 0.8 * 0.72 * 2^-7, or 8.6e-4, half of this bound; the
# rest is for rows whose INT8 differ, as the hardware's exp2 and reciprocal do in the last bit.
ROUNDED = 2**-7 * math.sqrt(3 / (8 * math.log(2)) / 12)
TOLERANCE = ROUNDED  # 1.7e-3
UNPINNED = {"FLYDSL_MOE_STAGE1_SCHED": False, "FLYDSL_MOE_STAGE2_SCHED": False}
SORTED = {"AITER_FLYDSL_STAGE1_TILE_M": 16}
PREFILL = {"AITER_FLYDSL_STAGE1_TILE_M": 64}
GATES: dict[str, dict[str, Any]] = {
    "decode": {},
    "unpinned": UNPINNED,
    "unpinned, k 128": {**UNPINNED, "AITER_FLYDSL_STAGE2_TILE_K": 128},
    "m 32, n 128": {"AITER_FLYDSL_STAGE2_TILE_M": 32, "AITER_FLYDSL_STAGE2_TILE_N": 128},
    "sorted": SORTED,
    "padded grid": {"AITER_FLYDSL_MOE_GRID_TRIM": False},
    "prefill": PREFILL,
    "prefill in chunks": {**PREFILL, "AITER_FLYDSL_STAGE2_TILE_N": 128},
    "prefill, n 64": {**PREFILL, "AITER_FLYDSL_STAGE1_TILE_N": 64, "KIMI_MOE_XCD_ORDER": False},
}
CASES = [
    *((8, tokens, "decode") for tokens in (1, 8, 160)), (4, 8, "decode"), (8, 160, "unpinned"), (8, 1, "prefill"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (8, 20, "decode"), (8, 8, "unpinned, k 128"), (4, 8, "m 32, n 128"), (8, 8, "sorted"), (8, 70, "padded grid"),
        (8, 160, "prefill in chunks"), (4, 300, "prefill"), (8, 8, "prefill, n 64"),
    )),
]  # fmt: skip
MORE = [*((4, tokens, "decode") for tokens in (1, 20, 160)), (4, 8, "unpinned"), (4, 8, "prefill")]


@cache
def layer(tp: int) -> QuarkMoeWeights:
    return random_layer(SHAPES[tp], CPU)


@cache
def prepared(tp: int) -> PreparedMoe:
    return FlydslBackend().prepare(layer(tp))


@cache
def expected(tp: int, tokens: int) -> torch.Tensor:
    """The reference backend's result."""
    reference, (x, router, ids) = ReferenceBackend(), given(tp, tokens)
    return reference.forward(x, reference.prepare(layer(tp)), router, ids)


def given(tp: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, router, ids = random_batch(SHAPES[tp], tokens, CPU)
    ids[tokens // 2 :: 7, 3] = -1
    ids[1:2] = -1  # a token with no expert on this rank
    ids[32:, 2:] = -1  # still several blocks an expert in large batches
    return x, router, ids


class Serving:
    """A backend, its GPU, and a folder with the code objects that a batch of `tokens` needs."""

    def __init__(self, folder: Path, tp: int, tokens: int, gates: dict[str, Any]) -> None:
        load_library()
        self.folder, self.shape, self.case = folder, SHAPES[tp], (tp, tokens)
        self.gpu, self.backend = InterpretedGpu(), FlydslBackend({**gates, flydsl_objects.GATE: str(folder)})
        self.configs = [*self.backend.configs(self.shape, tokens).values()]
        self.write({config: config for config in self.configs})
        self.x, self.router, self.ids = given(tp, tokens)

    def write(self, compiled_as: dict[KernelConfig, KernelConfig]) -> None:
        """Fill the folder: under the name of the first configuration the object of the second."""
        kernels = {}
        for name, config in compiled_as.items():
            image = code_object(assembly(config))  # LLVM may give one kernel other registers the next time
            kernels[repr(name)] = describe(image, len(signature(launcher_of(config).func).parameters))
            (self.folder / kernels[repr(name)].file).write_bytes(image)
            self.gpu.knows(assembly(config), parsed(config))
        manifest = flydsl_objects.KernelManifest(sources=flydsl_objects.source_hash(), kernels=kernels)
        (self.folder / flydsl_objects.MANIFEST).write_text(manifest.model_dump_json())

    def forward(self) -> torch.Tensor:
        moe = deepcopy(prepared(self.case[0]))  # a planted fault may write to it
        self.gpu.put(self.x, self.router, self.ids, moe.w13, moe.w2, moe.s13, moe.s2)
        with self.gpu:
            return self.backend.forward(self.x, moe, self.router, self.ids)

    def error(self) -> float:
        """Relative to the reference backend's result."""
        return relative(self.forward(), expected(*self.case))


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flydsl_backend, "stream_of", lambda tensor: STREAM)


@pytest.mark.parametrize(("tp", "tokens", "gates"), extent(CASES, CASES + MORE))
def test_forward_is_the_reference(
    tp: int, tokens: int, gates: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = 2 if "chunks" in gates else 1  # 512 columns by tiles of 128: three fit, so two at a time
    if chunks > 1:
        monkeypatch.setattr(flydsl_backend, "PARTIAL_BYTES", tokens * 8 * 384 * 2)
    serving = Serving(tmp_path, tp, tokens, GATES[gates])
    assert serving.error() < TOLERANCE
    launches = serving.gpu.launches
    sorts = tokens > 64 or gates not in ("decode", "unpinned", "unpinned, k 128")
    by_token = tokens <= 16 and gates in ("decode", "unpinned")
    stages = [*["moe_route_0"] * sorts, "moe_stage1_0"]
    down = ["moe_stage2_token_0"] if by_token else ["moe_stage2_0", "moe_reduce_0"] * chunks
    assert [launch.kernel for launch in launches] == [*stages, *down]
    assert {launch.stream for launch in launches} == {STREAM}


@pytest.mark.parametrize(("tp", "tokens"), [(8, 2), (4, 8), (8, 20), (4, 20)])
def test_a_token_has_the_same_bits_from_the_kernels_for_few_and_for_many_tokens(
    tp: int, tokens: int, tmp_path: Path
) -> None:
    found = []
    for name, gates in (("few", {}), ("many", SORTED)):
        (tmp_path / name).mkdir()
        found.append(Serving(tmp_path / name, tp, tokens, gates).forward())
    assert torch.equal(*found)


@pytest.mark.parametrize("gates", extent(["decode"], ["decode", "prefill"]))
def test_it_passes_the_gpu_checks_of_kimi_accept(gates: str, tmp_path: Path) -> None:
    serving = Serving(tmp_path, 8, 8, GATES[gates])
    with serving.gpu:
        (found,) = agreements(serving.backend, serving.shape, [8], CPU)
    assert found.tokens == 8


def test_no_tokens_launch_nothing(tmp_path: Path) -> None:
    serving = Serving(tmp_path, 8, 1, {})
    serving.x, serving.router, serving.ids = serving.x[:0], serving.router[:0], serving.ids[:0]
    out = serving.forward()
    assert out.shape == (0, 512) and out.dtype == torch.bfloat16 and not serving.gpu.launches


def test_a_broken_token_is_nan_and_its_neighbours_are_not(tmp_path: Path) -> None:
    serving = Serving(tmp_path, 8, 8, {})
    clean = serving.forward()
    serving.x[6, 5] = float("nan")
    got, others = serving.forward(), [token for token in range(8) if token != 6]
    assert got[6].isnan().all() and torch.equal(got[others], clean[others])


@pytest.mark.parametrize("tile_m", [None, 64])
def test_the_w4a16_baseline(tile_m: int | None, tmp_path: Path) -> None:
    """No quantized activations: plain matrix products, with the three roundings to bfloat16 that the baseline has."""
    serving = Serving(tmp_path, 8, 5, {"FLYDSL_W4A16_HYBRID": "w2_bf16", "AITER_FLYDSL_STAGE1_TILE_M": tile_m})
    weights = layer(8)
    w13 = unpack_reorder(weights.w13).double() * weights.s13[..., None]
    w2 = unpack_reorder(weights.w2).double() * weights.s2[..., None]
    expected = torch.zeros(5, serving.shape.hidden, dtype=torch.double)
    for t, s in (serving.ids >= 0).nonzero().tolist():
        gate, up = (w13[serving.ids[t, s]] @ serving.x[t].double()).chunk(2)
        h = (torch.nn.functional.silu(gate) * up).bfloat16().double()
        expected[t] += (w2[serving.ids[t, s]] @ h) * serving.router[t, s]
    assert relative(serving.forward(), expected) < 2 * ROUNDED  # sqrt(3), of a reference without any


# -- planted faults ----------------------------------------------------------------------------------------------------
def is_found(serving: Serving) -> bool:
    """True if the interpreter stops or the result is wrong."""
    try:
        return not serving.error() <= TOLERANCE  # unwritten values may be NaN
    except KimiError as error:
        return "hipErrorLaunchFailure" in str(error) and serving.gpu.error is not None


PLACES: list[tuple[Any, int, dict[str, Any]]] = [
    *((kind, at, SORTED) for kind, places in ((Stage1Config, (0, 4)), (Stage2Config, (1, 3))) for at in places),
    *((RouteConfig, at, SORTED) for at in (2, 4)),
    *((kind, at, {}) for kind, at in ((Stage1Config, 0), (ByTokenConfig, 0), (ByTokenConfig, 3))),
]


@pytest.mark.parametrize(("kind", "place", "gates"), PLACES)
def test_an_argument_in_the_wrong_place_is_found(
    kind: type, place: int, gates: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two neighbours are exchanged."""
    launch = flydsl_objects.CodeObjects.launch

    def exchanged(self: Any, config: Any, count: int, device: int, stream: int, arguments: tuple[int, ...]) -> None:
        if isinstance(config, kind):
            before, (a, b), after = arguments[:place], arguments[place : place + 2], arguments[place + 2 :]
            arguments = (*before, b, a, *after)
        launch(self, config, count, device, stream, arguments)

    monkeypatch.setattr(flydsl_objects.CodeObjects, "launch", exchanged)
    assert is_found(Serving(tmp_path, 8, 8, gates))


GRIDS: dict[str, Callable[[int, int, int], tuple[int, int, int]]] = {
    "half of the blocks": lambda x, y, z: (x, y // 2, z),  # the last few are spare
    "a column less": lambda x, y, z: (x - 1, y, z),
    "a column more": lambda x, y, z: (x + 1, y, z),
    "x for y": lambda x, y, z: (y, x, z),
}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *((Stage1Config, change) for change in ("half of the blocks", "a column more", "x for y")),
        *((ByTokenConfig, change) for change in ("half of the blocks", "x for y")),
        (Stage2Config, "a column less"),
    ],
)
def test_a_wrong_grid_is_found(kind: Any, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = kind.grid
    monkeypatch.setattr(kind, "grid", lambda self, count: GRIDS[change](*grid(self, count)))
    # Not eight tokens where the grid has eight columns: exchanged, it would be the same.
    assert is_found(Serving(tmp_path, 8, 4, {}) if kind is ByTokenConfig else Serving(tmp_path, 8, 8, SORTED))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (Stage1Config, {"inter": 512}),
        (Stage1Config, {"top_k": 6}),
        (Stage2Config, {"hidden": 1024}),
        (Stage2Config, {"inter": 512}),
        (RouteConfig, {"experts": 11}),
        (ByTokenConfig, {"inter": 512}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_an_object_of_another_shape_is_found(kind: type, changes: dict[str, int], tmp_path: Path) -> None:
    serving = Serving(tmp_path, 8, 8, {} if kind is ByTokenConfig else SORTED)
    serving.write({c: replace(c, **changes) if isinstance(c, kind) else c for c in serving.configs})
    assert is_found(serving)

"""The scheme between SGLang's layer and our backends, in process: checks, folded scales and the call to the backend."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.moe.contract import MoeShape, QuarkMoeWeights
from kimi_w4a8_eagle3.moe.flydsl.backend import FlydslBackend
from kimi_w4a8_eagle3.moe.reference import ReferenceBackend
from kimi_w4a8_eagle3.quark.packing import ABSENT, dequantized, fold_layer, fold_scales
from kimi_w4a8_eagle3.quark.weight_format import INT4, MXFP4, WeightFormat
from kimi_w4a8_laptop import cpu

if TYPE_CHECKING:
    from kimi_w4a8_eagle3.sglang_plugin.model.w4a8_moe import QuarkW4A8MoE

pytestmark = pytest.mark.skipif(find_spec("sglang") is None, reason="sglang is not installed (extra `serve`)")
SHAPE = MoeShape(num_experts=4, hidden=512, inter=128, top_k=2)


def new_scheme(weights: WeightFormat = INT4, **config: Any) -> QuarkW4A8MoE:
    cpu.install()
    # SGLang's import order, and its seconds: not where tests are only collected
    from kimi_w4a8_eagle3.sglang_plugin.model.w4a8_moe import MoeRunnerConfig, QuarkW4A8MoE

    scheme = QuarkW4A8MoE("layer 7", weights)
    scheme.create_moe_runner(SimpleNamespace(top_k=5), MoeRunnerConfig(**{"top_k": SHAPE.top_k, **config}))
    return scheme


def new_layer() -> Any:
    layer: Any = torch.nn.Module()
    layer.dispatcher = SimpleNamespace(use_aiter_moe_runner=True)
    return layer


def loaded(scheme: QuarkW4A8MoE) -> tuple[torch.nn.Module, QuarkMoeWeights]:
    """A layer as SGLang's loader leaves it, and its weights with the scales folded by `packing`."""
    layer = new_layer()
    scheme.create_weights(layer, SHAPE.num_experts, SHAPE.hidden, SHAPE.inter, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        if parameter.dtype == torch.int32:
            parameter.random_(-(2**31), 2**31 - 1, generator=generator)
        else:
            assert parameter.isnan().all()  # a scale that the loader never reaches is found
            parameter.uniform_(0.01, 0.1, generator=generator)
    gate_up = [
        fold_scales(scale, rows)
        for scale, rows in zip(layer.w13_weight_scale.unbind(1), layer.w13_weight_scale_2.chunk(2, dim=1), strict=True)
    ]
    s13, s2 = torch.cat(gate_up, dim=1), fold_scales(layer.w2_weight_scale, layer.w2_weight_scale_2)
    return layer, QuarkMoeWeights(SHAPE, layer.w13_weight.clone(), layer.w2_weight.clone(), s13, s2)


def batch(tokens: int = 3) -> Any:
    """The output of SGLang's dispatcher."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(SHAPE.num_experts, generator=generator)[: SHAPE.top_k] for _ in range(tokens)])
    topk = SimpleNamespace(topk_weights=torch.rand(ids.shape, generator=generator), topk_ids=ids.int())
    x = torch.randn(tokens, SHAPE.hidden, generator=generator).bfloat16()
    return SimpleNamespace(hidden_states=x, topk_output=topk)


@pytest.mark.parametrize(
    "config", [{"activation": "gelu"}, {"is_gated": False}, {"apply_router_weight_on_input": True}], ids=str
)
def test_a_layer_that_computes_something_else_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(KimiError, match="layer 7: activation"):
        new_scheme(**config)


@pytest.mark.parametrize(("top_k", "used"), [(SHAPE.top_k, SHAPE.top_k), (None, 5)])
def test_the_runners_top_k_comes_before_the_layers(top_k: int | None, used: int) -> None:
    assert new_scheme(top_k=top_k).top_k == used


@pytest.mark.parametrize(("cuda", "factor", "scale"), [("12.9", 2.5, 2.5), ("12.9", None, 1.0), (None, 2.5, 1.0)])
def test_the_output_is_scaled_only_where_the_model_does_not(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, factor: float | None, scale: float
) -> None:
    with monkeypatch.context() as pretended:
        pretended.setattr(torch.version, "cuda", cuda)
        pretended.setattr(torch.cuda, "is_available", lambda: True)
        scheme = new_scheme(routed_scaling_factor=factor)
    layer, weights = loaded(scheme)
    scheme.process_weights_after_loading(layer)
    reference, call = ReferenceBackend(), batch()
    topk = call.topk_output
    expected = reference.forward(call.hidden_states, reference.prepare(weights), topk.topk_weights, topk.topk_ids)
    got = scheme.apply_weights(layer, call).hidden_states
    assert expected.any() and torch.equal(got, expected * scale)


def test_on_a_cpu_the_model_scales() -> None:
    assert new_scheme(routed_scaling_factor=2.5).output_scale == 1.0


def test_the_dispatcher_leaves_it_the_ids_of_this_ranks_experts() -> None:
    """On AMD SGLang's dispatcher takes every runner for AITER's, which reads the ids of all ranks' experts."""
    scheme = new_scheme()
    layer, _ = loaded(scheme)
    scheme.process_weights_after_loading(layer)
    assert layer.dispatcher.use_aiter_moe_runner is False


def test_the_layer_keeps_only_what_the_backend_reads() -> None:
    scheme = new_scheme()
    layer, weights = loaded(scheme)
    for _ in range(2):  # SGLang may call it twice
        scheme.process_weights_after_loading(layer)
        assert scheme.moe is not None
        prepared = scheme.moe.prepared
        assert prepared.shape == SHAPE
        held = {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}
        read = {
            "w13_weight": prepared.w13,
            "w2_weight": prepared.w2,
            "w13_weight_scale": prepared.s13,
            "w2_weight_scale": prepared.s2,
        }
        assert held == {name: tensor.data_ptr() for name, tensor in read.items()}
        assert torch.equal(prepared.s13, weights.s13) and torch.equal(prepared.s2, weights.s2)


@pytest.mark.parametrize(
    ("name", "where", "projection"),
    [
        ("w13_weight_scale", (2, 1), "w13"),
        ("w13_weight_scale_2", (2, 200), "w13"),
        ("w2_weight_scale", (2,), "w2"),
        ("w2_weight_scale_2", (2, 9), "w2"),
    ],
)
def test_a_missing_scale_is_named(name: str, where: tuple[int, ...], projection: str) -> None:
    scheme = new_scheme()
    layer, _ = loaded(scheme)
    getattr(layer, name)[where] = float("nan")
    with pytest.raises(KimiError, match=rf"layer 7: 1 of 4 experts .* in {projection} .*first is expert 2"):
        scheme.process_weights_after_loading(layer)


def loaded_mxfp4(scheme: QuarkW4A8MoE, least: int) -> torch.nn.Module:
    layer = new_layer()
    scheme.create_weights(layer, SHAPE.num_experts, SHAPE.hidden, SHAPE.inter, torch.bfloat16)
    for name, parameter in layer.named_parameters():
        if "scale" in name:
            assert (parameter == 255).all()  # a scale that the loader never reaches is found
        parameter.random_(*((least, 121) if "scale" in name else (0, 256)))
    return layer


@pytest.mark.parametrize(("least", "parts"), [(109, 1), (108, 2), (90, 3)])
def test_rows_of_too_many_octaves_are_computed_in_parts_and_logged(
    least: int, parts: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme = new_scheme(MXFP4)
    from kimi_w4a8_eagle3.sglang_plugin.model import w4a8_moe

    select, asked = w4a8_moe.select_backend, list[bool]()
    monkeypatch.setattr(w4a8_moe, "select_backend", lambda *given, in_parts: asked.append(in_parts) or select(*given))
    layer = loaded_mxfp4(scheme, least)
    w13, w2 = layer.w13_weight.clone(), layer.w2_weight.clone()
    folded = fold_layer((w13, layer.w13_weight_scale), (w2, layer.w2_weight_scale))
    weights = QuarkMoeWeights.of(replace(SHAPE, weights=MXFP4), w13, w2, folded)
    far = sum(int((shifts == ABSENT).sum()) for shifts, _ in folded[0])
    for _ in range(2):  # SGLang may call it twice
        scheme.process_weights_after_loading(layer)
    assert len(folded) == parts and [bool(far)] == asked == [parts > 1]  # flydsl computes one part
    assert (f"layer 7: {far} of 24576 MXFP4 blocks lie too far below" in caplog.text) == (parts > 1)
    reference, call = ReferenceBackend(), batch()
    topk = call.topk_output
    expected = reference.forward(call.hidden_states, reference.prepare(weights), topk.topk_weights, topk.topk_ids)
    assert expected.any() and torch.equal(scheme.apply_weights(layer, call).hidden_states, expected)


def test_a_nan_scale_of_mxfp4_is_named() -> None:
    scheme = new_scheme(MXFP4)
    layer = loaded_mxfp4(scheme, 113)
    layer.w2_weight_scale[2, 7, 1] = 255
    with pytest.raises(KimiError, match=r"layer 7: 1 of 4 experts .* in w2 .*first is expert 2"):
        scheme.process_weights_after_loading(layer)


def test_an_mxfp4_mlp_is_computed_in_bfloat16() -> None:
    new_scheme()
    from kimi_w4a8_eagle3.sglang_plugin.model.w4a8_moe import QuarkMxfp4Linear

    scheme, layer = QuarkMxfp4Linear("layer 0"), torch.nn.Module()
    with pytest.raises(KimiError, match="layer 0: 48 inputs on each rank are not a multiple of 32"):
        scheme.create_weights(layer, [8], 48, torch.bfloat16, print)
    scheme.create_weights(layer, [8, 8], 64, torch.bfloat16, print)
    with pytest.raises(KimiError, match="layer 0: an MXFP4 scale is missing or NaN"):
        scheme.process_weights_after_loading(layer)
    for parameter, width in ((layer.weight, 32), (layer.weight_scale, 2)):  # rank 1 of 2 takes the second half of K
        whole = torch.arange(16 * 2 * width, dtype=torch.uint8).view(16, 2 * width)
        parameter.load_row_parallel_weight(whole, tp_rank=1)
        assert torch.equal(parameter.data, whole[:, width:])
    layer.weight.random_(0, 256)
    layer.weight_scale.random_(100, 140)
    weight, x = dequantized(layer.weight, layer.weight_scale), torch.randn(3, 64).bfloat16()
    for _ in range(2):
        scheme.process_weights_after_loading(layer)
    assert torch.equal(scheme.apply_weights(layer, x), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize(("hidden", "inter", "named"), [(60, 32, "hidden size 60"), (64, 20, "per rank 20")])
def test_sizes_that_do_not_fill_words_are_refused(hidden: int, inter: int, named: str) -> None:
    with pytest.raises(KimiError, match=f"layer 7: the .*{named} is not a multiple of 8"):
        new_scheme().create_weights(torch.nn.Module(), 2, hidden, inter, torch.bfloat16)


def test_each_layer_runs_with_the_gates_that_it_was_loaded_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers, loaded under different gates, in one process; launches are recorded instead of made."""
    launched: list[Any] = []
    monkeypatch.setattr(FlydslBackend, "unsupported", lambda self, shape, device: self.shape_problem(shape))
    monkeypatch.setattr(FlydslBackend, "launch", lambda self, config, *args: launched.append(config))
    monkeypatch.setenv("KIMI_LOAD_CHECK", "0")  # it would run the kernels

    schemes = []
    for pinned in ("1", "0"):
        monkeypatch.setenv("FLYDSL_MOE_STAGE1_SCHED", pinned)
        schemes.append(new_scheme())
        layer, _ = loaded(schemes[-1])
        schemes[-1].process_weights_after_loading(layer)
    for scheme in schemes:
        scheme.apply_weights(None, batch())
    assert [config.pinned for config in launched if type(config).__name__ == "Stage1Config"] == [True, False]

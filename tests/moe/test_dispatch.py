"""Backend choice: preference, overrides, reasons; and the custom operator around it."""

from __future__ import annotations

import logging
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.moe import dispatch
from kimi_w4a8_eagle3.moe.contract import MoeShape, check_call
from kimi_w4a8_eagle3.moe.op import MoeLayer, w4a8_moe
from kimi_w4a8_eagle3.moe.reference import ReferenceBackend
from kimi_w4a8_lab.kernels.random_layers import random_layer

SHAPE = MoeShape(num_experts=4, hidden=64, inter=32, top_k=2)
CPU = torch.device("cpu")


def test_a_cpu_gets_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_selected", set())
    assert dispatch.selected_backends() == set()
    assert dispatch.select_backend(SHAPE, CPU, {}).name == "reference"
    assert dispatch.selected_backends() == {"reference"}


@pytest.mark.parametrize("name", ["flydsl", "triton"])
def test_an_override_that_cannot_run_is_an_error_with_the_reason(name: str) -> None:
    for gates, requested, asked_by in (({}, name, "--moe-backend"), ({dispatch.GATE: name}, "auto", dispatch.GATE)):
        with pytest.raises(KimiError) as error:
            dispatch.select_backend(SHAPE, CPU, gates, requested)
        assert name in str(error.value) and "GPU" in str(error.value) and error.value.where == asked_by


def test_flydsl_is_not_replaced_where_it_was_requested_for_weights_in_parts() -> None:
    with pytest.raises(KimiError, match="'flydsl' cannot run: rows span more octaves"):
        dispatch.select_backend(SHAPE, CPU, {}, "flydsl", in_parts=True)


def test_the_argument_beats_the_gate() -> None:
    assert dispatch.select_backend(SHAPE, CPU, {dispatch.GATE: "triton"}, "reference").name == "reference"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(KimiError, match=r"flydsl \| triton \| reference"):
        dispatch.select_backend(SHAPE, CPU, {dispatch.GATE: "cutlass"})


@pytest.mark.parametrize(
    ("arch", "problem", "chosen"),
    [
        ("gfx942", "", "flydsl"),
        ("gfx942", "no code objects", "triton"),
        ("gfx942", "rows span more octaves", "triton"),
        ("gfx950", "", "triton"),
        ("sm_90", "", "triton"),
    ],
)
def test_preference_by_arch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, arch: str, problem: str, chosen: str
) -> None:
    """Only the machine is pretended: which names are tried, and in which order, is dispatch's own."""
    monkeypatch.setattr(dispatch, "_logged", set())

    class Runs:
        def __init__(self, name: str) -> None:
            self.name = name

        def unsupported(self, shape: MoeShape, device: torch.device) -> str | None:
            runs = self.name != "flydsl" or (arch == "gfx942" and problem != "no code objects")
            return None if runs else "no code objects"

    monkeypatch.setattr(dispatch, "gpu_arch", lambda device: arch)
    monkeypatch.setattr(dispatch, "find_spec", lambda name: object())
    monkeypatch.setattr(dispatch, "load_backend", lambda name, gates: Runs(name))
    with caplog.at_level(logging.INFO, logger=dispatch.__name__):
        found = dispatch.select_backend(SHAPE, torch.device("cuda"), {}, in_parts=problem.startswith("rows"))
    assert found.name == chosen
    [logged] = caplog.records
    could_be_faster = bool(problem)
    assert logged.levelno == (logging.WARNING if could_be_faster else logging.INFO)
    assert not could_be_faster or f"not flydsl: {problem}" in logged.getMessage()


@pytest.mark.parametrize(
    ("found", "reason"),
    [(object(), "it does not import (no module triton.language)"), (None, "the package triton is not installed")],
)
def test_a_backend_that_does_not_import_is_passed_over_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found: object, reason: str
) -> None:
    def load(name: str, gates: object) -> ReferenceBackend:
        if name != "reference":
            raise ImportError(f"no module {name}.language")
        return ReferenceBackend()

    monkeypatch.setattr(dispatch, "_logged", set())
    monkeypatch.setattr(dispatch, "find_spec", lambda name: found)
    monkeypatch.setattr(dispatch, "load_backend", load)
    with caplog.at_level(logging.INFO, logger=dispatch.__name__):
        assert dispatch.select_backend(SHAPE, CPU, {}).name == "reference"
    assert f"not flydsl: it does not import (no module flydsl.language); not triton: {reason}" in caplog.text


def test_the_operator_runs_the_backend_and_traces_under_fake_tensors() -> None:
    backend = ReferenceBackend()
    layer = MoeLayer(backend, random_layer(SHAPE, CPU))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    weights, ids = torch.rand(3, 2), torch.tensor([[0, 3], [2, -1], [1, 0]], dtype=torch.int32)
    expected = backend.forward(x, layer.prepared, weights, ids)
    assert torch.equal(layer(x, weights, ids), expected)

    compiled = torch.compile(lambda x: layer(x, weights, ids), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), expected)
    assert torch._C._dispatch_has_kernel_for_dispatch_key("kimi::w4a8_moe", "CompositeExplicitAutograd")  # any device
    torch.library.opcheck(w4a8_moe, (x, weights, ids, layer.handle), test_utils="test_faketensor")  # size and dtype


def test_every_layer_runs_the_backend_object_that_prepared_it() -> None:
    """Backends of one name may differ, for example in their gates; a compiled graph with both keeps them apart."""

    class Twice(ReferenceBackend):
        def forward(self, *args: Any) -> torch.Tensor:
            return 2 * super().forward(*args)

    first, second = MoeLayer(ReferenceBackend(), random_layer(SHAPE, CPU)), MoeLayer(Twice(), random_layer(SHAPE, CPU))
    x, weights, ids = torch.ones(1, 64).bfloat16(), torch.ones(1, 2), torch.tensor([[0, 1]], dtype=torch.int32)
    expected = first(x, weights, ids)
    assert expected.any() and torch.equal(second(x, weights, ids), 2 * expected)

    def both(x: torch.Tensor) -> torch.Tensor:
        return first(x, weights, ids) + second(x, weights, ids)

    assert torch.equal(torch.compile(both, backend="eager", fullgraph=True)(x), both(x))


def test_a_prepared_layer_cannot_be_changed() -> None:
    """Compiled graphs and other layers' plans rely on it."""
    prepared = ReferenceBackend().prepare(random_layer(SHAPE, CPU))
    for name in ("w13", "layout", "shape"):
        with pytest.raises(FrozenInstanceError):
            setattr(prepared, name, getattr(prepared, name))


def test_arguments_of_a_backend_are_checked() -> None:
    prepared = ReferenceBackend().prepare(random_layer(SHAPE, CPU))
    x, weights, ids = torch.zeros(3, 64).bfloat16(), torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int32)
    check_call(x, prepared, prepared.layout, weights, ids)
    with pytest.raises(KimiError, match="cannot read weights in layout 'reference-integers'"):
        check_call(x, prepared, "another", weights, ids)
    for name, call in {
        "x is torch.float32": (x.float(), weights, ids),
        "x is torch.bfloat16": (x[:, 1:], weights, ids),
        "topk_weights": (x, weights[:2], ids),
        "topk_ids is torch.int64": (x, weights, ids.long()),
        "topk_ids is torch.int32": (x, weights, ids[:, :1]),
    }.items():
        with pytest.raises(KimiError, match=name):
            check_call(call[0], prepared, prepared.layout, *call[1:])

"""The built-in model's files: published format, digest of docs/virtual-node.md, and a stock program that runs them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.plain_target import PlainTarget
from support.repository import ROOT

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.quark.preflight import preflight
from kimi_w4a8_lab.accuracy.problems import parse_answer, problems
from kimi_w4a8_laptop import tiny
from kimi_w4a8_laptop.tiny.tokenizer import chat_text

Tensors = dict[str, torch.Tensor]


def tensors(folder: Path) -> Tensors:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def test_the_weights_are_the_bytes_whose_digest_the_page_names() -> None:
    """As `sha256sum` prints it for the list that `sha256sum` makes of the files."""
    files = sorted(str(file.relative_to(tiny.WEIGHTS)) for file in tiny.WEIGHTS.rglob("*") if file.is_file())
    listed = "".join(f"{hashlib.sha256((tiny.WEIGHTS / file).read_bytes()).hexdigest()}  {file}\n" for file in files)
    assert hashlib.sha256(listed.encode()).hexdigest() in (ROOT / "docs/virtual-node.md").read_text()


@pytest.mark.parametrize("folder", [tiny.target_path, tiny.target_bf16_path])
def test_the_index_names_every_tensor_and_all_are_finite(folder: Callable[[], Path]) -> None:
    found = tensors(folder())
    weight_map = json.loads((folder() / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(weight_map) == set(found)
    assert {file.name for file in folder().glob("*.safetensors")} == set(weight_map.values())
    assert all(torch.isfinite(value).all() for value in found.values() if value.dtype != torch.int32)
    assert all((value > 0).all() for name, value in found.items() if "weight_scale" in name)


def test_quantization_config_is_the_published_one() -> None:
    config = json.loads((tiny.target_path() / "config.json").read_text())
    quantization = config["quantization_config"]
    first, second = quantization["global_quant_config"]["weight"]
    assert (first["dtype"], first["qscheme"], first["is_dynamic"]) == ("fp8_e4m3", "per_tensor", False)
    assert (second["dtype"], second["qscheme"], second["ch_axis"]) == ("int4", "per_channel", 0)
    inputs = quantization["global_quant_config"]["input_tensors"]
    assert (inputs["dtype"], inputs["qscheme"], inputs["is_dynamic"]) == ("fp8_e4m3", "per_tensor", True)
    assert (quantization["quant_method"], quantization["export"]["pack_method"]) == ("quark", "reorder")
    assert not [name for name in quantization["exclude"] if ".experts." in name]
    excluded = {
        name.removesuffix(".weight")
        for name, value in tensors(tiny.target_path()).items()
        if value.dtype == torch.bfloat16 and value.dim() == 2 and "embed" not in name
    }
    assert set(quantization["exclude"]) == excluded


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_package_accepts_its_own_checkpoints(tp: int) -> None:
    report = preflight(tiny.target_path(), tiny.draft_path(), tp)
    assert report.ok, report.problems


def test_transformers_solves_problems_with_the_target() -> None:
    target = PlainTarget()
    assert [parse_answer(target.answer(chat_text(one.question))) for one in problems(4)] == [
        one.answer for one in problems(4)
    ]


def test_a_missing_checkpoint_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tiny, "WEIGHTS", tmp_path)
    with pytest.raises(KimiError, match="target-w4a8 is missing"):
        tiny.target_path()

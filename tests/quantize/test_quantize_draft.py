"""FP8 drafts: the card's dtype table, Quark's configuration, the exclude list that vLLM needs."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.kimi_checkpoint import edit_json
from support.quantizing import quantize

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.quark.safetensors_header import read_checkpoint
from kimi_w4a8_lab.quantize.exclude import fix_exclude
from kimi_w4a8_laptop import tiny

VLLM = ["re:.*fc.*", "re:.*lm_head.*"]


def exclude_of(directory: Path) -> list[str]:
    return json.loads((directory / "config.json").read_text())["quantization_config"]["exclude"]


def test_dtypes_and_configuration_are_those_of_the_published_draft(fp8: Path) -> None:
    dtypes = Counter(tensor.dtype for tensor in read_checkpoint(fp8).tensors.values())
    assert dtypes == {"F8_E4M3": 7, "F32": 7, "F16": 6, "BF16": 1}
    assert exclude_of(fp8) == ["fc", "lm_head"]
    quantization = json.loads((fp8 / "config.json").read_text())["quantization_config"]
    layer, common = quantization["global_quant_config"], {"dtype": "fp8_e4m3", "qscheme": "per_channel"}
    assert layer["weight"].items() >= (common | {"ch_axis": 0, "is_dynamic": False}).items()
    assert layer["input_tensors"].items() >= (common | {"ch_axis": 1, "is_dynamic": True}).items()
    assert layer["output_tensors"] is None and quantization["quant_method"] == "quark"


def test_weights_are_scaled_by_row(card_draft: Path, fp8: Path) -> None:
    before, after = load_file(card_draft / "model.safetensors"), load_file(fp8 / "model.safetensors")
    for name in (name.removesuffix("_scale") for name in after if name.endswith("_scale")):
        weight, scale = before[name].float(), after[f"{name}_scale"]
        torch.testing.assert_close(scale, weight.abs().amax(1) / 448)
        # Half an FP8 step of the value, or of the smallest normal number.
        error = (after[name].float() * scale[:, None] - weight).abs()
        assert (error <= (weight.abs() / 16).clamp(min=2**-10) * 1.001 + scale[:, None] * 2**-9).all()
    for name in ("fc.weight", "lm_head.weight", "embed_tokens.weight", "norm.weight"):
        assert torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype


def test_the_built_in_draft(tmp_path: Path) -> None:
    result = quantize("fp8-draft", tiny.draft_path(), tmp_path / "fp8", "--vllm-exclude")
    assert result.exit_code == 0, result.exception
    assert exclude_of(tmp_path / "fp8") == VLLM


@pytest.fixture
def copy(fp8: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(fp8, tmp_path / "copy"))


def test_fix_exclude_rewrites_once_and_touches_nothing_else(copy: Path) -> None:
    before = json.loads((copy / "config.json").read_text())
    first, text = quantize("fix-exclude", copy), (copy / "config.json").read_text()
    second = quantize("fix-exclude", copy)
    assert "rewritten" in first.stdout and "already" in second.stdout
    assert (copy / "config.json").read_text() == text and exclude_of(copy) == VLLM
    after = json.loads(text)
    before["quantization_config"]["exclude"] = after["quantization_config"]["exclude"] = None
    assert after == before
    assert sorted(f.name for f in copy.iterdir()) == ["config.json", "model.safetensors"]
    names = ["model.fc", "re:.*lm_head.*", "lm_head", "midlayer.self_attn.o_proj"]
    edit_json(copy / "config.json", lambda config: config["quantization_config"].update(exclude=names))
    assert fix_exclude(copy) and exclude_of(copy) == [*VLLM, names[-1]]


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (None, "was not quantized by AMD Quark"),
        ({"quant_method": "fp8"}, "was not quantized by AMD Quark"),
        ({"quant_method": "quark", "exclude": ["lm_head"]}, "lacks fc"),
    ],
)
def test_fix_exclude_refuses_a_draft_that_is_not_fp8(copy: Path, quantization: object, message: str) -> None:
    edit_json(copy / "config.json", lambda config: config.update(quantization_config=quantization))
    text = (copy / "config.json").read_text()
    with pytest.raises(KimiError, match=message):
        fix_exclude(copy)
    assert (copy / "config.json").read_text() == text

"""W4A8 targets made by `kimi-w4a8 quantize w4a8-target` on the real AMD Quark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.quantizing import quantize, quantized

from kimi_w4a8_eagle3.quark.packing import dequantized, fold_scales, unpack_reorder
from kimi_w4a8_eagle3.quark.preflight import preflight
from kimi_w4a8_laptop import tiny


def test_the_shipped_model_is_reproduced_bit_for_bit(w4a8: Path) -> None:
    shipped = tiny.target_path()
    assert sorted(file.name for file in w4a8.iterdir()) == sorted(file.name for file in shipped.iterdir())
    for file in shipped.iterdir():
        assert (w4a8 / file.name).read_bytes() == file.read_bytes(), file.name
    assert not list(w4a8.parent.glob(".*"))


def test_compressed_tensors_int4_is_read(packed: Path, tmp_path: Path) -> None:
    result = quantized("w4a8-target", packed, tmp_path / "out")
    assert preflight(result).problems == []
    # Compared with the packed weights it was made from, not with the BF16 ones behind them.
    before, after = all_tensors(packed), all_tensors(result)
    experts = [name.removesuffix("_scale_2") for name in after if name.endswith(".weight_scale_2")]
    assert len(experts) == 192
    for name in experts:
        original = unpacked({part: before[f"{name}_{part}"] for part in ("packed", "scale", "shape")})
        scale = fold_scales(after[f"{name}_scale"], after[f"{name}_scale_2"])
        found = unpack_reorder(after[name]).float() * scale.unsqueeze(-1)
        assert (found - original).norm() < 0.2 * original.norm(), name
    config = json.loads((result / "config.json").read_text())
    shipped = json.loads((tiny.target_path() / "config.json").read_text())
    assert config["quantization_config"] == shipped["quantization_config"]
    assert "quantization_config" not in config["text_config"]


def unpacked(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """The float32 matrix of a packed weight, by the compressed-tensors library."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    values = unpack_from_int32(parts["packed"], 4, torch.Size(parts["shape"].tolist())).float()
    return (values.view(*parts["scale"].shape, -1) * parts["scale"].float().unsqueeze(-1)).view(values.shape)


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("words", ["--exclude *lm_headx", "--exclude *mlp.gatex", "--device banana"])
def test_a_pattern_or_device_that_names_nothing_is_refused(tmp_path: Path, words: str) -> None:
    result = quantize("w4a8-target", tiny.target_bf16_path(), tmp_path / "out", *words.split())
    assert words.split()[1] in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_mxfp4_rounds_the_routed_experts_alone(tmp_path: Path) -> None:
    result = quantized("w4a8-target", tiny.target_bf16_path(), tmp_path / "out", "--format", "mxfp4")
    report, before, after = preflight(result), all_tensors(tiny.target_bf16_path()), all_tensors(result)
    assert report.problems == [] and report.weight_format == "Quark MXFP4"
    for name, original in before.items():
        if ".mlp.experts." in name:
            exponents = after[f"{name}_scale"]
            unit = torch.exp2(exponents.repeat_interleave(32, 1).float() - 127)
            # The largest value of a block is below 8 of its units and becomes 6. All others are off by 1 at most.
            off = (dequantized(after[name], exponents) - original).abs()
            assert bool((off <= 2 * unit).all()), name
        else:
            assert torch.equal(after[name], original), name

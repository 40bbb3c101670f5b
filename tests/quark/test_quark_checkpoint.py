"""Unpacking and scale folding against checkpoints that AMD Quark writes during this run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kimi_checkpoint import edit_json, read_shards, rewrite

from kimi_w4a8_eagle3.quark.packing import fold_scales, unpack_reorder
from kimi_w4a8_eagle3.quark.preflight import preflight
from kimi_w4a8_laptop import tiny


def quark_dequantize(words: torch.Tensor, scale: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    """Quark's own unpacking and its dequantization kernels, the second stage first."""
    from quark.torch.kernel import dequantize
    from quark.torch.utils.pack import Pack_4_bits

    values = Pack_4_bits(qscheme="per_channel", dtype="int4").unpack(words, reorder=True).float()
    fp8 = dequantize("int4", values, scale_2, torch.zeros_like(scale_2, dtype=torch.int32), 0, None, "per_channel")
    return dequantize("fp8_e4m3", fp8, scale.reshape(()), None, None, None, "per_tensor")


def assert_same_weight(tensors: dict[str, torch.Tensor], name: str, original: torch.Tensor) -> None:
    words, scale, scale_2 = (tensors[name + suffix] for suffix in ("", "_scale", "_scale_2"))
    rows, columns = original.shape
    assert words.shape == (rows, columns // 8) and words.dtype == torch.int32
    assert scale.dtype == scale_2.dtype == torch.float32 and scale_2.shape == (rows,)
    step = fold_scales(scale, scale_2).unsqueeze(-1)
    theirs, ours = quark_dequantize(words, scale, scale_2), unpack_reorder(words).float() * step
    # The same product of three factors; multiplied in another order, so one rounding apart.
    torch.testing.assert_close(ours, theirs, rtol=2e-7, atol=0)
    # And it is the original weight within one INT4 step plus FP8 rounding (2**-4), so not a consistent permutation.
    assert ((ours - original.float()).abs() <= 0.51 * step + original.float().abs() / 16).all()


def test_every_expert_dequantizes_as_quark_does(bf16_target: Path, quark_target: Path) -> None:
    originals = {k: v for shard in read_shards(bf16_target).values() for k, v in shard.items()}
    quantized = {k: v for shard in read_shards(quark_target).values() for k, v in shard.items()}
    experts = [name for name in originals if ".mlp.experts." in name]
    assert len(experts) == 5 * 4 * 3
    for name in experts:
        assert_same_weight(quantized, name, originals[name])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_quark_checkpoint_passes_preflight(quark_target: Path, draft: Path, tp: int) -> None:
    report = preflight(quark_target, draft, tp)
    assert report.problems == []
    assert report.weight_format == "Quark W4A8"
    assert report.small_tensors_read > 5 * 4 * 3 * 2
    assert report.shards == 2


def test_the_unquantized_model_passes_too(bf16_target: Path) -> None:
    report = preflight(bf16_target)
    assert report.ok and report.weight_format == "not quantized" and report.small_tensors_read == report.tensors


def test_the_text_model_alone_passes_as_kimi_k2_thinking_ships_it(tmp_path: Path) -> None:
    def unwrap(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("language_model.")] = tensors.pop(name)

    target = Path(shutil.copytree(tiny.target_path(), tmp_path / "target"))
    rewrite(target, unwrap)
    edit_json(target / "config.json", lambda config: config.update(config.pop("text_config")))
    report = preflight(target, tiny.draft_path(), tp=2)
    assert report.problems == [] and report.weight_format == "Quark W4A8" and report.small_tensors_read > 4 * 16 * 3 * 2

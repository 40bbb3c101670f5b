"""Checkpoints in formats that the kernels compute, and the meaning of their exclude lists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kimi_w4a8_eagle3.quark import weight_format as formats
from kimi_w4a8_eagle3.quark.config import ExcludeRules, TextShape, read_model_config
from kimi_w4a8_eagle3.quark.quantization import weight_format

FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
INT4 = {"dtype": "int4", "qscheme": "per_channel", "ch_axis": 0, "is_dynamic": False}
SIZES = {
    "num_hidden_layers": 7,
    **dict.fromkeys(("hidden_size", "vocab_size", "num_attention_heads", "moe_intermediate_size"), 8),
}


def config(weight: Any, method: str = "quark") -> dict[str, Any]:
    return {"quant_method": method, "global_quant_config": {"weight": weight}, "exclude": None, "unknown": [1, {}]}


MX = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "is_dynamic": False}


def test_the_formats_are_recognised() -> None:
    assert weight_format(config([FP8, INT4])) == formats.INT4
    assert weight_format({"weight": [FP8, INT4], "input_tensors": FP8 | {"is_dynamic": True}}) == formats.INT4
    for activations in (None, MX | {"is_dynamic": True}, FP8):
        assert weight_format({"weight": MX, "input_tensors": activations}) == formats.MXFP4


@pytest.mark.parametrize(
    "other",
    [
        config([INT4, FP8]),
        config([FP8]),
        config([FP8, INT4, INT4]),
        config([FP8, INT4 | {"ch_axis": 1}]),
        config([FP8, INT4 | {"qscheme": "per_group", "group_size": 32}]),
        config([FP8 | {"is_dynamic": True}, INT4]),
        config([FP8 | {"dtype": "fp4"}, INT4]),
        *(config(weight) for weight in (FP8, [MX, MX], None, "int4")),
        *(config(MX | other) for other in ({"group_size": 16}, {"scale_format": None}, {"is_dynamic": True})),
        config(MX | {"dtype": "fp6_e3m2"}),
        config([FP8, INT4], method="compressed-tensors"),
        {"quant_method": "quark"},
        {"quant_method": "fp8", "weight": [FP8, INT4]},
        {"quant_method": "quark", "global_quant_config": None},
        {},
    ],
)
def test_other_quantizations_are_none_of_them(other: dict[str, Any]) -> None:
    assert weight_format(other) is None


def test_exclude_rules() -> None:
    rules = ExcludeRules(["language_model.lm_head", "model.layers.0.mlp.up_proj", "re:.*self_attn.*", "*vision_tower*"])
    excluded = ["lm_head", "language_model.lm_head", "language_model.model.layers.0.mlp.up_proj"]
    excluded += ["model.layers.7.self_attn.o_proj", "vision_tower.blocks.0"]
    assert all(name in rules for name in excluded)
    assert "model.layers.0.mlp.up_proj_2" not in rules and "model.layers.10.mlp.up_proj" not in rules
    assert "lm_head" not in ExcludeRules([])
    for pattern in ("re:lm_head", "re:language_model"):  # with and without the wrapper's prefix
        assert "language_model.lm_head" in ExcludeRules([pattern])


def test_regular_expressions_match_from_the_start_as_in_sglang() -> None:
    from sglang.srt.layers.quantization.quark.utils import check_equal_or_regex_match

    patterns = ["re:lm_head", "re:.*fc.*", "model.norm"]
    for name in ["lm_head", "lm_head_2", "model.lm_head", "model.fc", "model.norm", "model.norm.weight"]:
        assert (name in ExcludeRules(patterns)) == check_equal_or_regex_match(name, patterns), name


def test_moe_layers() -> None:
    assert TextShape(**SIZES, n_routed_experts=4, first_k_dense_replace=1).moe_layers == [1, 2, 3, 4, 5, 6]
    assert TextShape(**SIZES, n_routed_experts=4, moe_layer_freq=2).moe_layers == [0, 2, 4, 6]
    assert TextShape(**SIZES).moe_layers == []


@pytest.mark.parametrize(
    ("vision", "layers"), [({}, 27), ({"vt_num_hidden_layers": 3}, 3), ({"num_hidden_layers": 5}, 5), (None, None)]
)
def test_layers_of_the_vision_tower(tmp_path: Path, vision: dict[str, int] | None, layers: int | None) -> None:
    config = {"model_type": "kimi_k25", "text_config": SIZES, "vision_config": vision}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_model_config(tmp_path)
    assert found.tower_layers == layers and found.architectures == []

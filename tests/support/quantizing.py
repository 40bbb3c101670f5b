"""`quantize` as a test calls it, and sources: the built-in target in INT4 groups, a draft of the card's dtypes."""

from __future__ import annotations

import ast
import json
import os
import shutil
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from click.testing import Result
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_eagle3.quark.safetensors_header import INDEX_NAME
from kimi_w4a8_lab.quantize import quantize as quantize_module

from .kimi_checkpoint import edit_json

GROUP = 32
HIDDEN, INTER, VOCAB = 64, 96, 80
PACKED_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True},
        }
    },
    "ignore": ["re:.*self_attn.*", "lm_head", "re:.*shared_experts.*"],
}


@cache
def import_quark() -> None:
    """Quark, without the ten seconds in which it parses every model of transformers for a decorator that few name."""
    parse = ast.parse

    def parse_if_named(source: Any, *more: Any, **options: Any) -> ast.AST:
        scan = sys._getframe(1).f_code.co_name == "_find_decorated_experts_classes"
        return parse("" if scan and "use_experts_implementation" not in source else source, *more, **options)

    with patch.object(ast, "parse", parse_if_named), suppress(KimiError):  # `quantize` says what is missing
        quantize_module.import_quark()


def quantize(*arguments: object) -> Result:
    with patch.dict(os.environ):  # engines whose variables Quark has changed would need a fork server of their own
        import_quark()
        return CliRunner().invoke(app, ["quantize", *map(str, arguments)])


def quantized(*arguments: object) -> Path:
    """`kimi-w4a8 quantize COMMAND SRC DST ...`, which must succeed; returns DST."""
    result = quantize(*arguments)
    assert result.exit_code == 0, result.exception
    return Path(str(arguments[2]))


def compress_int4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """INT4 in groups of 32 with the compressed-tensors library's own packing, by the last part of the names."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    groups = weight.float().view(weight.shape[0], -1, GROUP)
    scale = (groups.abs().amax(-1) / 7).clamp(min=1e-8).bfloat16()
    values = (groups / scale.float().unsqueeze(-1)).round().clamp(-8, 7).to(torch.int8).view(weight.shape)
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    return {"weight_packed": pack_to_int32(values, 4), "weight_scale": scale, "weight_shape": shape}


def write_packed_target(bf16: Path, directory: Path) -> Path:
    """The same checkpoint with its routed experts packed, shard by shard."""
    shutil.copytree(bf16, directory)
    weight_map = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(file).items():
            parts = compress_int4(tensor) if ".mlp.experts." in name else {"": tensor}
            stem = name.removesuffix("weight") if ".mlp.experts." in name else name
            tensors |= {stem + part: value for part, value in parts.items()}
        save_file(tensors, file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file.name)
    (directory / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    edit_json(directory / "config.json", lambda config: config["text_config"].update(quantization_config=PACKED_CONFIG))
    return directory


def write_card_draft(directory: Path) -> Path:
    """Small sizes, but the tensors and dtypes of the published draft: F16, with the embedding in BF16."""
    torch.manual_seed(0)
    shapes = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "midlayer.self_attn.q_proj.weight": (HIDDEN, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": (HIDDEN, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": (HIDDEN, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "midlayer.mlp.gate_proj.weight": (INTER, HIDDEN),
        "midlayer.mlp.up_proj.weight": (INTER, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, INTER),
        "midlayer.input_layernorm.weight": (HIDDEN,),
        "midlayer.hidden_norm.weight": (HIDDEN,),
        "midlayer.post_attention_layernorm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    tensors = {name: (torch.randn(shape) / 8).half() for name, shape in shapes.items()}
    tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN).bfloat16()
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "torch_dtype": "float16"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory

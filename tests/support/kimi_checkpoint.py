"""A small Kimi-shaped BF16 checkpoint with two shards, the config of a draft for it, and ways to break both."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kimi_w4a8_laptop import tiny

HIDDEN, INTER, DENSE_INTER, EXPERTS, LAYERS, HEADS, VOCAB = 64, 32, 48, 4, 6, 4, 96
CAPTURED = [2, 3, 4]
TEXT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": DENSE_INTER,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "moe_intermediate_size": INTER,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
}
DRAFT = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "draft_vocab_size": 40,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "intermediate_size": 2 * HIDDEN,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": CAPTURED},
}
MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
MLA_DRAFT = {**DRAFT, **MLA, "architectures": ["Eagle3DeepseekV2ForCausalLM"]}


def _mlp(prefix: str, inter: int) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}.gate_proj.weight": torch.randn(inter, HIDDEN),
        f"{prefix}.up_proj.weight": torch.randn(inter, HIDDEN),
        f"{prefix}.down_proj.weight": torch.randn(HIDDEN, inter),
    }


def write_bf16(directory: Path) -> None:
    torch.manual_seed(0)
    directory.mkdir()
    shards: list[dict[str, torch.Tensor]] = [{}, {}]
    for layer in range(LAYERS):
        shard, prefix = shards[layer % 2], f"language_model.model.layers.{layer}"
        shard[f"{prefix}.input_layernorm.weight"] = torch.ones(HIDDEN)
        shard[f"{prefix}.self_attn.o_proj.weight"] = torch.randn(HIDDEN, HIDDEN)
        if layer == 0:
            shard.update(_mlp(f"{prefix}.mlp", DENSE_INTER))
            continue
        shard[f"{prefix}.mlp.gate.weight"] = torch.randn(EXPERTS, HIDDEN)
        shard.update(_mlp(f"{prefix}.mlp.shared_experts", INTER))
        for expert in range(EXPERTS):
            shard.update(_mlp(f"{prefix}.mlp.experts.{expert}", INTER))
    shards[0]["language_model.model.embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
    shards[1]["language_model.lm_head.weight"] = torch.randn(VOCAB, HIDDEN)
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-00002.safetensors"
        save_file({k: v.to(torch.bfloat16) for k, v in shard.items()}, directory / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": TEXT}
    (directory / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))


def seeing(directory: Path) -> Path:
    """A copy of the built-in target that is served with its vision tower."""
    shutil.copytree(tiny.target_path(), directory)
    edit_json(directory / "config.json", lambda config: config.update(language_model_only=False))
    return directory


def read_shards(directory: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {path.name: load_file(path) for path in sorted(directory.glob("*.safetensors"))}


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Let `change` edit each shard's tensors in place, then write shards and index to match."""
    weight_map = {}
    for name, tensors in read_shards(directory).items():
        change(tensors)
        save_file(tensors, directory / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    index = directory / "model.safetensors.index.json"
    if index.exists():
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def edit_tensor(directory: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Replace a tensor by what `change` makes of it; None takes it out."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        if name in tensors:
            new = change(tensors.pop(name))
            tensors.update({} if new is None else {name: new})

    rewrite(directory, edit)


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Let `change` edit a JSON file's object in place."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))

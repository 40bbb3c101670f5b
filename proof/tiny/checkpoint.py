"""Write and read the checkpoints: Kimi-K2.5 names, sharded safetensors with an index, config and tokenizer beside."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kimi_w4a8_eagle3.moe.reference import integers
from kimi_w4a8_eagle3.quark.packing import fold_exponents, fold_scales
from kimi_w4a8_lab.draft.eagle3 import Draft

from .config import (
    DraftConfig,
    MlaDraftConfig,
    TargetConfig,
    TowerConfig,
    draft_config_json,
    draft_sizes,
    generation_config_json,
    preprocessor_config_json,
    target_config_json,
)
from .experts import Experts, Int4Weights
from .model import TargetModel
from .tokenizer import save_tokenizer
from .tower import Tower

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PREFIX = "language_model."
_SHARD = "model-{:05d}-of-00003.safetensors"
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(\w+)$")


def save_target(model: TargetModel, tower: Tower, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the BF16 target as a KimiK25ForConditionalGeneration checkpoint: two shards of text, one of the tower."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {PREFIX + name: tensor for name, tensor in target_tensors(model).items()}
    names = sorted(tensors, key=lambda name: [int(n) if n.isdigit() else n for n in re.split(r"(\d+)", name)])
    half = -(-len(names) // 2)
    seen = tower.bfloat16().state_dict()
    parts = {_SHARD.format(1): names[:half], _SHARD.format(2): names[half:], _SHARD.format(3): sorted(seen)}
    tensors |= seen
    for file, part in parts.items():
        _save_tensors({name: tensors[name] for name in part}, folder / file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    weight_map = {name: file for file, part in parts.items() for name in part}
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(folder / "config.json", target_config_json(model.config, tower.c))
    _write_json(folder / "preprocessor_config.json", preprocessor_config_json(tower.c))
    _write_json(folder / "generation_config.json", generation_config_json())
    save_tokenizer(tokenizer, folder, model.config.context)


def load_tower(folder: Path) -> Tower:
    """Read the tower of a target, which is BF16 in each, in evaluation mode."""
    tower = Tower(TowerConfig()).bfloat16()
    tower.load_state_dict({k: v for k, v in read_tensors(folder).items() if not k.startswith(PREFIX)})
    return tower.eval()


def target_tensors(model: TargetModel) -> dict[str, Tensor]:
    """The checkpoint's tensors without the wrapper's prefix: BF16, the router bias float32, experts one by one."""
    out: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        full = name if name.startswith("lm_head") else f"model.{name}"
        if full.endswith("e_score_correction_bias"):
            out[full] = tensor.float()
        elif full.endswith(".experts.gate_up"):
            for i, (gate, up) in enumerate((expert.chunk(2, 0)) for expert in tensor.bfloat16()):
                out[full.replace("gate_up", f"{i}.gate_proj.weight")] = gate.contiguous()
                out[full.replace("gate_up", f"{i}.up_proj.weight")] = up.contiguous()
        elif full.endswith(".experts.down"):
            for i, down in enumerate(tensor.bfloat16()):
                out[full.replace("experts.down", f"experts.{i}.down_proj.weight")] = down.contiguous()
        else:
            out[full] = tensor.bfloat16()
    return out


def load_target(folder: Path, config: TargetConfig | None = None) -> TargetModel:
    """Read a BF16, W4A8 or MXFP4 checkpoint of the built-in target; the result is BF16, in evaluation mode."""
    config = config or TargetConfig()
    tensors = read_tensors(folder)
    state: dict[str, Tensor] = {}
    experts: dict[str, dict[tuple[str, str], dict[int, Tensor]]] = {}
    for name, tensor in tensors.items():
        if not name.startswith(PREFIX):
            continue  # the tower's
        name = name.removeprefix(PREFIX).removeprefix("model.")
        if match := _EXPERT.match(name):
            group, index, projection, kind = match.groups()
            experts.setdefault(group, {}).setdefault((projection, kind), {})[int(index)] = tensor
        else:
            state[name] = tensor
    model = TargetModel(config).bfloat16()
    for router in model.routers():
        router.e_score_correction_bias = router.e_score_correction_bias.float()
    for group, parts in experts.items():
        stacked = {key: torch.stack([by_index[i] for i in sorted(by_index)]) for key, by_index in parts.items()}
        module = model.get_submodule(group)
        assert isinstance(module, Experts)
        if ("gate", "weight_scale") in stacked:
            module.int4 = _int4_weights(stacked)
            state[f"{group}.gate_up"] = torch.zeros_like(module.gate_up)
            state[f"{group}.down"] = torch.zeros_like(module.down)
        else:
            state[f"{group}.gate_up"] = torch.cat([stacked["gate", "weight"], stacked["up", "weight"]], 1)
            state[f"{group}.down"] = stacked["down", "weight"]
    model.load_state_dict(state)
    return model.eval()


def save_draft(model: Draft, target: TargetConfig, config: DraftConfig | MlaDraftConfig, folder: Path) -> None:
    """Write a BF16 draft, without the embedding: the server hands it the target's."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: weight.bfloat16().contiguous() for name, weight in model.state_dict().items()}
    _save_tensors(tensors, folder / "model.safetensors")
    _write_json(folder / "config.json", draft_config_json(target, config))


def load_draft(folder: Path, target: TargetModel) -> Draft:
    """Read a draft of either kind back, BF16, in evaluation mode."""
    tensors = load_file(folder / "model.safetensors")
    mla = any("kv_b_proj" in name for name in tensors)
    sizes = draft_sizes(target.config, MlaDraftConfig() if mla else DraftConfig())
    model = Draft(sizes, target.config.vocab).bfloat16()
    model.load_state_dict(tensors)
    return model.eval()


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of all shards of a checkpoint."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def _int4_weights(stacked: dict[tuple[str, str], Tensor]) -> Int4Weights:
    """Return the integers of INT4 or MXFP4 experts and the scales of their rows."""
    folded = {part: _integers(stacked, part) for part in ("gate", "up", "down")}
    gate_up, gate_up_scale = (torch.cat(pair, 1) for pair in zip(folded["gate"], folded["up"], strict=True))
    return Int4Weights(gate_up, gate_up_scale, *folded["down"])


def _integers(stacked: dict[tuple[str, str], Tensor], part: str) -> tuple[Tensor, Tensor]:
    codes, scale = stacked[part, "weight"], stacked[part, "weight_scale"]
    if codes.dtype == torch.uint8:
        ((shift, rows),) = fold_exponents(codes, scale)
        return integers(codes, shift).float(), rows
    return integers(codes, None).float(), fold_scales(scale, stacked[part, "weight_scale_2"])


def _save_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors writes for the owner only


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")

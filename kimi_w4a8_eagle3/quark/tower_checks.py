"""Check of a vision tower: with missing weights SGLang would start and then see noise."""

from __future__ import annotations

from .findings import Findings, Problem
from .safetensors_header import Checkpoint

# SGLang replaces the published names by its own while it loads.
_RENAMED = {
    "wqkv.": "attn.qkv_proj.",
    "wo.": "attn.proj.",
    "mm_projector.proj.0": "mm_projector.linear_1",
    "mm_projector.proj.2": "mm_projector.linear_2",
}
_ONCE = (
    "vision_tower.patch_embed.proj",
    "vision_tower.encoder.final_layernorm",
    "mm_projector.pre_norm",
    "mm_projector.linear_1",
    "mm_projector.linear_2",
)
_IN_A_LAYER = ("norm0", "norm1", "attn.qkv_proj", "attn.proj", "mlp.fc0", "mlp.fc1")


def check_tower(checkpoint: Checkpoint, layers: int) -> list[Problem]:
    """Check that every weight and bias of SGLang's Kimi-K2.5 tower with `layers` layers is present."""
    findings = Findings("vision tower")
    found = {_sglang_name(name) for name in (*checkpoint.tensors, *checkpoint.unread)}
    repeated = [f"vision_tower.encoder.blocks.{i}.{module}" for i in range(layers) for module in _IN_A_LAYER]
    wanted = [f"{module}.{kind}" for module in (*_ONCE, *repeated) for kind in ("weight", "bias")]
    for name in [*wanted, "vision_tower.patch_embed.pos_emb.weight"]:
        if name not in found:
            findings.add(
                "weight of the vision tower is missing",
                checkpoint.directory,
                f"a tower of {layers} layers, as vision_config says",
                "fetch the checkpoint again; for text alone `language_model_only: true` in config.json",
                name,
            )
    return findings.problems()


def _sglang_name(name: str) -> str:
    for published, own in _RENAMED.items():
        name = name.replace(published, own)
    return name

"""Serves the built-in model with corrupted checkpoints, finite in every value, and prints what refuses each of them.

    python -m proof.corruptions [NAME ...]

Exit code 1 when one becomes ready. A recipe's sha256 refuses all by their bytes, so it is left out where the recorded
answers find a corruption. They ask for no picture.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import typer
from safetensors.torch import load_file, save_file

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.engine.process import free_port
from kimi_w4a8_eagle3.fleet.checks import checked, weights_digest
from kimi_w4a8_eagle3.fleet.replica import Replica
from kimi_w4a8_eagle3.recipe.launch import load_recipe, render
from kimi_w4a8_laptop import tiny

# exchange: of the tensors with one part in their name and those with the other. Others change what a pattern matches.
CORRUPTIONS: dict[str, tuple[Any, ...]] = {
    "two layers exchanged": ("exchange", "layers.2.", "layers.3."),
    "gate and up of the dense layer exchanged": ("exchange", "0.mlp.gate_proj", "0.mlp.up_proj"),
    "gate and up of a shared expert exchanged": ("exchange", "2.mlp.shared_experts.gate", "2.mlp.shared_experts.up"),
    "two experts exchanged with their scales": ("exchange", "layers.1.mlp.experts.0.", "layers.1.mlp.experts.1."),
    "attention of two layers exchanged": ("exchange", "layers.1.self_attn", "layers.4.self_attn"),
    "kv_b_proj of two layers exchanged": ("exchange", "layers.0.self_attn.kv_b_proj", "layers.1.self_attn.kv_b_proj"),
    "q_b_proj of two layers exchanged": ("exchange", "layers.2.self_attn.q_b_proj", "layers.3.self_attn.q_b_proj"),
    "an o_proj transposed": ("transpose", r"layers\.2\.self_attn\.o_proj"),
    "the final norm 20 % larger": (1.2, r"model\.norm"),
    "an input norm halved": (0.5, r"layers\.1\.input_layernorm"),
    "a q_a norm doubled": (2.0, r"layers\.3\.self_attn\.q_a_layernorm"),
    "rows of lm_head moved by one": ("roll", "lm_head"),
    "embeddings moved by one": ("roll", "embed_tokens"),
    "rows of a router moved by one": ("roll", r"layers\.2\.mlp\.gate\.weight"),
    "biases of the routers zeroed": (0.0, "e_score_correction_bias"),
    "scales of a layer's experts 10 % larger": (1.1, r"layers\.2\.mlp\.experts.*weight_scale_2"),
    "rope_theta 10": ("config", {"rope_theta": 10.0}),
    "two experts for a token instead of four": ("config", {"num_experts_per_tok": 2}),
    "routed_scaling_factor 1": ("config", {"routed_scaling_factor": 1.0}),
    "the vision patch three times as large": (3.0, r"patch_embed\.proj"),
}


def corrupted(name: str, folder: Path) -> Path:
    """Write the built-in checkpoint with one of the corruptions."""
    shutil.copytree(tiny.target_path(), folder)
    how, what, *twin = CORRUPTIONS[name]
    if how == "config":
        config = json.loads((folder / "config.json").read_text())
        config["text_config"] |= what
        (folder / "config.json").write_text(json.dumps(config))
        return folder
    before = {path: load_file(path) for path in folder.glob("*.safetensors")}
    tensors = {key: one for file in before.values() for key, one in file.items()}
    change = {"transpose": lambda one: one.T, "roll": lambda one: one.roll(1, 0)}.get(how, lambda one: one * how)
    changed = {key: change(one) for key, one in tensors.items() if not twin and re.search(what, key)}
    for one, other in ((what, twin[0]), (twin[0], what)) if twin else ():
        changed |= {key: tensors[key.replace(one, other)] for key in tensors if one in key}
    assert changed and any(not value.equal(tensors[key]) for key, value in changed.items())
    for path, file in before.items():
        save_file({key: changed.get(key, one).contiguous() for key, one in file.items()}, path, {"format": "pt"})
    return folder


def refusal(model: Path, scratch: Path, setting: str) -> str:
    """Start a replica of the checkpoint and return why it is not ready; empty if it is."""
    words = [f"port={free_port()}", "context-length=8192", f"model.repo={model}", setting]

    def announce(_: str, event: str, reason: str) -> None:
        if event == "ready":
            replica.end()

    launch = render(load_recipe("tiny:plain"), words)
    replica = Replica(launch, scratch / "log", announce, "0", "tiny", 0.0)
    try:
        replica.launch = checked(launch)
        replica.serve()
    except KimiError as error:
        return "" if replica.was_ready else error.what
    return ""


def main(names: list[str] = typer.Argument(None)) -> None:
    sha256, ready = weights_digest(tiny.target_path()), 0
    print("| corruption | refused by | why |\n|---|---|---|")
    for name in names or CORRUPTIONS:
        with tempfile.TemporaryDirectory() as scratch:
            model, means = corrupted(name, Path(scratch, "model")), "recorded answers"
            if not (why := refusal(model, Path(scratch), "model.answers=tiny")):
                means, why = "sha256", refusal(model, Path(scratch), f"model.sha256={sha256}")
        ready += not why
        print(f"| {name} | {means if why else 'nothing'} | {why} |", flush=True)
    raise SystemExit(ready > 0)


if __name__ == "__main__":
    typer.run(main)

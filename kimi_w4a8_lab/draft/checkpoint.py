"""Read drafts and the target's embedding from checkpoints, and write a trained draft as a whole or not at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.files import read_json
from kimi_w4a8_eagle3.quark.config import TextShape, draft_shape, read_model_config
from kimi_w4a8_eagle3.quark.preflight import captured_layers, check_draft
from kimi_w4a8_eagle3.quark.safetensors_header import read_checkpoint
from kimi_w4a8_eagle3.supervision.checks import weights_digest

from .eagle3 import Draft, DraftSizes
from .layers import LatentSizes

_EMBEDDINGS = ("language_model.model.embed_tokens.weight", "model.embed_tokens.weight", "embed_tokens.weight")
_HEADS = ("language_model.lm_head.weight", "lm_head.weight")
_WEIGHTS = "model.safetensors"


def draft_sizes(folder: Path, target: Path) -> DraftSizes:
    """Return the sizes of a draft in `folder`; raise KimiError for what this trainer does not compute."""
    raw = read_json(folder / "config.json")
    fields = raw.get("text_config", raw)
    shape = draft_shape(raw, folder / "config.json")
    if shape.fc_norm or fields.get("norm_output"):
        raise KimiError("the trainer computes no draft with fc_norm or norm_output", str(folder), "a draft of EAGLE3")
    hidden, latent = shape.hidden_size, None
    if shape.mla:
        scaling = fields.get("rope_scaling") or {}
        if {"factor", "beta_fast", "beta_slow", "original_max_position_embeddings"} - scaling.keys():
            raise KimiError("the draft's rope_scaling is not of the kind yarn", str(folder), "factor, beta_fast, ...")
        scaling = {"mscale_all_dim": 0.0, **scaling}
        latent = LatentSizes(
            hidden, shape.num_attention_heads, shape.mla.q_lora_rank, shape.mla.kv_lora_rank,
            shape.mla.qk_nope_head_dim, shape.mla.qk_rope_head_dim, shape.mla.v_head_dim, fields["rms_norm_eps"],
            fields["rope_theta"], scaling,
        )  # fmt: skip
    elif fields.get("rope_scaling") and fields["rope_scaling"].get("rope_type", "default") != "default":
        raise KimiError("the trainer computes no rope_scaling of MHA drafts", str(folder), "rope_scaling: null")
    heads = shape.num_attention_heads
    return DraftSizes(
        hidden=hidden, target_hidden=shape.target_hidden_size or hidden, inter=shape.intermediate_size or 4 * hidden,
        rows=shape.draft_vocab_size or 0, captured=tuple(captured_layers(shape, read_model_config(target).text)),
        eps=fields.get("rms_norm_eps", 1e-5), heads=heads, kv_heads=shape.num_key_value_heads or heads,
        head_dim=shape.head_dim or hidden // heads, rope_theta=fields.get("rope_theta", 10_000.0), latent=latent,
    )  # fmt: skip


def load_draft(folder: Path, target: Path) -> Draft:
    """Return the draft in `folder` of the target in `target`, float32; raise KimiError for one that does not fit."""
    text = _check(folder, target)
    tensors = {_plain(name): tensor for name, tensor in _tensors(folder).items()}
    if low := [name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.element_size() < 2]:
        expected = "a draft in 16 bits, to be quantized afterwards"
        raise KimiError(f"the draft's {low[0]} has 8 bits", str(folder), expected)
    sizes, proposed = draft_sizes(folder, target), None
    if "d2t" in tensors:
        proposed = tensors["d2t"].long() + torch.arange(len(tensors["d2t"]))
    draft = Draft(sizes, text.vocab_size, proposed)
    if not sizes.rows:
        tensors["lm_head.weight"] = target_tensor(target, _HEADS)
        draft.lm_head.requires_grad_(False)
    draft.load_state_dict({name: tensors[name].float() for name in draft.state_dict()})
    return draft


def _check(folder: Path, target: Path) -> TextShape:
    """Return the target's sizes; raise KimiError for the first thing that would keep the draft from being served."""
    text, config = read_model_config(target).text, folder / "config.json"
    checkpoint, shape = read_checkpoint(folder), draft_shape(read_json(config), config)
    for error in checkpoint.problems:
        raise error
    for problem in check_draft(shape, checkpoint, text, 1):
        raise problem.error()
    return text


def target_tensor(target: Path, names: tuple[str, ...] = _EMBEDDINGS) -> Tensor:
    """Return the first of the named tensors of a target, by default its embedding [vocab, hidden]."""
    found = read_checkpoint(target).tensors
    for name in names:
        if name in found:
            with safe_open(found[name].file, "pt") as file:
                tensor: Tensor = file.get_tensor(name)
                return tensor
    raise KimiError(f"the target has no {names[0]}", str(target), " or ".join(names))


def save_draft(
    draft: Draft, first: Path, folder: Path, record: dict[str, Any], target: Path, extends: str = ""
) -> None:
    """Write the trained draft with the names, dtypes and config of `first`, from which it was trained.

    extends: recipe of the target, for a recipe with the new draft beside it. The folder appears complete. Raises
    KimiError when it exists, and for a draft that SGLang could not serve.
    """
    if folder.exists():
        raise KimiError("the folder exists", str(folder), "a new folder", "name another with --to")
    state, tensors = draft.state_dict(), _tensors(first)
    for name, tensor in tensors.items():
        if _plain(name) in state:
            tensors[name] = state[_plain(name)].to("cpu", tensor.dtype).contiguous()
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for file in first.iterdir():
        if file.suffix in (".json", ".py", ".model") and not file.name.endswith(".index.json"):
            shutil.copyfile(file, partial / file.name)
    save_file(tensors, partial / _WEIGHTS, metadata={"format": "pt"})
    (partial / _WEIGHTS).chmod(0o644)  # safetensors writes for the owner only
    digest = weights_digest(partial)
    (partial / "training.json").write_text(json.dumps({**record, "sha256": digest}, indent=2) + "\n")
    if extends:
        named = (f"extends = {json.dumps(extends)}", f'summary = "{Path(extends).stem} with a draft for own traffic"')
        pinned = ("", "[draft]", f"repo = {json.dumps(str(folder.resolve()))}", f'sha256 = "{digest}"', "")
        (partial / "recipe.toml").write_text("\n".join((*named, *pinned)))
    _check(partial, target)
    partial.rename(folder)


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _plain(name: str) -> str:
    return name.removeprefix("model.").replace("layers.0.", "midlayer.")

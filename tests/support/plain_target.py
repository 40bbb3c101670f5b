"""The built-in W4A8 target in transformers' own DeepseekV3, with its experts as floating-point numbers."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from kimi_w4a8_eagle3.moe.reference import integers
from kimi_w4a8_eagle3.quark.packing import fold_scales
from kimi_w4a8_laptop import tiny, torchvision_ops

_TEXT = "language_model."


class PlainTarget:
    """The target without SGLang. INT8 rounds the activations of a served one, so its states differ by that."""

    def __init__(self) -> None:
        torchvision_ops.declare_missing()
        from transformers import DeepseekV3ForCausalLM

        with TemporaryDirectory() as folder:
            save_file(_text_weights(), Path(folder, "model.safetensors"), metadata={"format": "pt"})
            config = json.loads((tiny.target_path() / "config.json").read_text())["text_config"]
            Path(folder, "config.json").write_text(json.dumps(config))
            self._model: Any
            self._model, info = DeepseekV3ForCausalLM.from_pretrained(
                folder, dtype=torch.float32, output_loading_info=True
            )
        assert not info["missing_keys"] and not info["unexpected_keys"]
        self._model.eval()
        self._tokenizer = Tokenizer.from_file(str(tiny.target_path() / "tokenizer.json"))

    def answer(self, prompt: str) -> str:
        """Return the greedy answer of at most 192 tokens."""
        tokens = self._tokenizer.encode(prompt).ids
        found = self._model.generate(torch.tensor([tokens]), max_new_tokens=192, do_sample=False)[0]
        return str(self._tokenizer.decode(found[len(tokens) :].tolist()))

    @torch.no_grad()
    def states(self, tokens: list[int], layers: tuple[int, ...]) -> Tensor:
        """Return the hidden states that enter these layers, side by side, float32 [T, len(layers) * hidden]."""
        found = self._model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return torch.cat([found[layer][0] for layer in layers], -1)


def _text_weights() -> dict[str, Tensor]:
    stored = {
        name: value for file in tiny.target_path().glob("*.safetensors") for name, value in load_file(file).items()
    }
    weights = {}
    for name, value in stored.items():
        if not name.startswith(_TEXT) or "weight_scale" in name:
            continue
        if f"{name}_scale" in stored:
            scale = fold_scales(stored[f"{name}_scale"], stored[f"{name}_scale_2"])
            value = integers(value, None).float() * scale.unsqueeze(-1)
        weights[name.removeprefix(_TEXT)] = value
    return weights

"""AMD Quark's FP8 linear layers on the CPU: SGLang's scheme with its GPU kernel replaced by plain torch.

SGLang accepts the format only for GPUs and multiplies with a GPU kernel. The arithmetic here is the same: the input is
quantized to FP8 per token, the product is accumulated in float32 and scaled per token and channel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import torch

from kimi_w4a8_eagle3.quark.fp8 import linear

logger = logging.getLogger(__name__)

TARGET = "sglang.srt.layers.quantization.quark.quark.QuarkConfig.get_linear_scheme"


def get_linear_scheme(original: Callable[..., Any], config: Any, layer: torch.nn.Module, layer_name: str) -> Any:
    """AROUND hook of `QuarkConfig.get_linear_scheme`: ours for per-channel FP8 weights, SGLang's otherwise."""
    found = config._find_matched_config(layer_name, layer)
    weight, inputs = found.get("weight"), found.get("input_tensors")
    if isinstance(weight, dict) and weight.get("qscheme") == "per_channel" and config._is_fp8_w8a8(weight, inputs):
        logger.info("%s: per-channel FP8 weights, multiplied by the torch reference", layer_name)
        return _scheme_class()(weight, inputs)
    return original(config, layer, layer_name)


def _scheme_class() -> type:
    # SGLang's import order: this hook loads first
    from sglang.srt.layers.quantization.quark.schemes import QuarkW8A8Fp8

    class ReferenceFp8(QuarkW8A8Fp8):
        """Quark FP8 scheme that creates and loads weights as SGLang does and multiplies in torch."""

        @classmethod
        def get_min_capability(cls) -> int:
            return 0

        def apply_weights(
            self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            weight, scale = cast(torch.Tensor, layer.weight), cast(torch.Tensor, layer.weight_scale)
            out = linear(x, weight.t(), scale)  # SGLang keeps it transposed
            return out if bias is None else out + bias

    return ReferenceFp8

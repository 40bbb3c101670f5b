"""AMD Quark's FP8 linear layers on the CPU: SGLang's scheme with its GPU kernel replaced by plain torch.

SGLang accepts the format only for GPUs and multiplies with a GPU kernel. The arithmetic here is the same: the input is
quantized to FP8 per token, the product is accumulated in float32 and scaled per token and channel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import torch

logger = logging.getLogger(__name__)

TARGET = "sglang.srt.layers.quantization.quark.quark.QuarkConfig.get_linear_scheme"
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def get_linear_scheme(original: Callable[..., Any], config: Any, layer: torch.nn.Module, layer_name: str) -> Any:
    """AROUND hook of `QuarkConfig.get_linear_scheme`: ours for per-channel FP8 weights, SGLang's otherwise."""
    found = config._find_matched_config(layer_name, layer)
    weight, inputs = found.get("weight"), found.get("input_tensors")
    if isinstance(weight, dict) and weight.get("qscheme") == "per_channel" and config._is_fp8_w8a8(weight, inputs):
        logger.info("%s: per-channel FP8 weights, multiplied by the torch reference", layer_name)
        return _scheme_class()(weight, inputs)
    return original(config, layer, layer_name)


def linear(x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """Multiply x [..., K] by an FP8 weight [K, N] with a scale per output channel, [N] or [N, 1]; keep x's dtype.

    An all-zero token gives zeros.
    """
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True) / FP8_MAX
    quantized = (wide / scale.clamp(min=torch.finfo(torch.float32).tiny)).clamp(-FP8_MAX, FP8_MAX)
    product = quantized.to(torch.float8_e4m3fn).float() @ weight.float()
    return (product * scale * weight_scale.float().view(-1)).to(x.dtype)


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
            out = linear(x, weight, scale)
            return out if bias is None else out + bias

    return ReferenceFp8

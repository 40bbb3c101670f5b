"""SGLang's QuarkConfig for the formats that our kernels compute: `[fp8_e4m3 per_tensor, int4 per_channel]` and MXFP4.

Only a checkpoint in one of them gets it; SGLang handles every other checkpoint as before.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

import torch
from sglang.srt.layers.quantization.quark.quark import QuarkConfig

from ...base.errors import KimiError
from ...quark.quantization import is_glob, weight_format
from ...quark.weight_format import INT4, MXFP4
from ..hooks import Feature
from .w4a8_moe import QuarkMxfp4Linear, QuarkW4A8MoE

_SGLANG = "sglang.srt.layers.quantization.quark.quark.QuarkConfig"
FEATURE = Feature(
    "W4A8 checkpoints",
    remove_when="SGLang reads Quark's two-stage INT4 x INT8 format, and computes MXFP4 x INT8, on gfx942",
    needs=(f"{_SGLANG}._find_matched_config", f"{_SGLANG}.get_moe_scheme", f"{_SGLANG}.get_linear_scheme"),
)

# Fused modules of Kimi's text model that SGLang's model class does not map to their parts. Without this mapping the
# excluded dense and shared-expert MLPs would not be recognised as excluded.
_FUSED = {"gate_up_proj": ["gate_proj", "up_proj"], "fused_qkv_a_proj_with_mqa": ["q_a_proj", "kv_a_proj_with_mqa"]}


class W4A8QuarkConfig(QuarkConfig):
    """QuarkConfig that gives experts our scheme. Other layers must be excluded from quantization or, MLPs, be MXFP4."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        names = self.quant_config.get("exclude") or []  # Quark's globs (`*lm_head`) become SGLang's `re:` patterns
        self.exclude_layers = ["re:" + fnmatch.translate(name) if is_glob(name) else name for name in names]

    @property
    def packed_modules_mapping(self) -> dict[str, list[str]]:
        """Map each fused module to its parts; SGLang assigns the model class's mapping after construction."""
        return {**_FUSED, **self._packed_modules_mapping}

    @packed_modules_mapping.setter
    def packed_modules_mapping(self, mapping: dict[str, list[str]]) -> None:
        self._packed_modules_mapping = mapping

    @staticmethod
    def _get_block_fp8_config(
        layer_quant_config: Mapping[str, Any] | None, packed_modules_mapping: Mapping[str, list[str]]
    ) -> object:
        """Return None for two stages: SGLang, since 0.5.23, would read a block size, which two stages do not have."""
        if layer_quant_config and weight_format(layer_quant_config) == INT4:
            return None
        return QuarkConfig._get_block_fp8_config(layer_quant_config, packed_modules_mapping)

    def get_moe_scheme(self, module: torch.nn.Module, layer_name: str, *args: object, **kwargs: object) -> object:
        """Return our scheme for a layer in one of our formats and SGLang's for any other."""
        if weights := weight_format(self._find_matched_config(layer_name, module)):
            return QuarkW4A8MoE(layer_name, weights)
        return super().get_moe_scheme(module, layer_name, *args, **kwargs)

    def get_linear_scheme(self, layer: torch.nn.Module, layer_name: str) -> object:
        """Load an MXFP4 layer as BF16, and refuse a two-stage layer: only routed experts have kernels for it."""
        weights = weight_format(self._find_matched_config(layer_name, layer))
        if weights == MXFP4:
            return QuarkMxfp4Linear(layer_name)
        if weights == INT4:
            raise KimiError(
                f"the linear layer {layer_name} is not excluded from W4A8 quantization",
                where="config.json, quantization_config.exclude",
                expected="only routed experts in W4A8: attention, router, lm_head, dense and shared MLPs excluded",
                remedy="quantize the checkpoint with the published exclude list (`kimi-w4a8 quantize w4a8-target`)",
            )
        return super().get_linear_scheme(layer, layer_name)


@FEATURE.around(f"{_SGLANG}.from_config")
def from_config(original: Callable[..., QuarkConfig], cls: type[QuarkConfig], config: Mapping[str, Any]) -> QuarkConfig:
    """Construct our subclass when our kernels compute the format."""
    return original(W4A8QuarkConfig if weight_format(config) else cls, config)

"""Quantize a BF16 EAGLE3 draft to AMD Quark `ptpc_fp8`: FP8 weights with a scale per channel, inputs per token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .quantize import run_quark

if TYPE_CHECKING:
    from quark.torch.quantization.config.config import QConfig

# `fc` merges three hidden states of the target and lm_head chooses the token, so both stay in BF16.
DRAFT_EXCLUDE = ("fc", "lm_head")


def quantize_fp8(source: Path, destination: Path, *, device: str = "cpu", verbose: bool = False) -> None:
    """Quantize every linear layer of the draft in `source` except `fc` and `lm_head` to the new folder `destination`.

    A projection [N, K] becomes `weight` F8_E4M3 [N, K] and `weight_scale` float32 [N].
    """
    run_quark(source, destination, _config, device, verbose)


def _config() -> QConfig:
    # optional: amd-quark
    from quark.torch.quantization.config.config import FP8E4M3PerChannelSpec, QConfig, QLayerConfig

    weight = FP8E4M3PerChannelSpec(is_dynamic=False, ch_axis=0).to_quantization_spec()
    activation = FP8E4M3PerChannelSpec(is_dynamic=True, ch_axis=1).to_quantization_spec()
    return QConfig(
        global_quant_config=QLayerConfig(weight=weight, input_tensors=activation), exclude=list(DRAFT_EXCLUDE)
    )

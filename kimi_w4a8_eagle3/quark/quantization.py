"""Format of the weights in AMD Quark's entry in config.json, `quantization_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from .weight_format import INT4, MXFP4, WeightFormat

_GLOB_CHARACTERS = "*?["


class TensorQuant(BaseModel):
    """One stage of Quark's quantization of one tensor."""

    dtype: str | None = None
    qscheme: str | None = None
    ch_axis: int | None = None
    group_size: int | None = None
    is_dynamic: bool | None = None
    scale_format: str | None = None

    @property
    def is_micro(self) -> bool:
        """True for 4- and 6-bit floats in blocks, of which this package computes MXFP4."""
        return (self.dtype or "").startswith(("fp4", "fp6", "mx"))

    def __str__(self) -> str:
        group = f", group size {self.group_size}, scales {self.scale_format}" if self.group_size else ""
        return f"{self.dtype} {self.qscheme}{group}"


class LayerQuant(BaseModel):
    """Quantization of a layer's weight: none, one stage, or a list of stages applied in order."""

    weight: TensorQuant | list[TensorQuant] | None = None

    @property
    def stages(self) -> list[TensorQuant]:
        """The stages of the weight in the order in which they were applied."""
        return self.weight if isinstance(self.weight, list) else [self.weight] if self.weight else []

    @property
    def weight_format(self) -> WeightFormat | None:
        """The format that the kernels of this package compute, or None.

        INT4 is FP8 per tensor, then INT4 per output channel. MXFP4 is FP4 in blocks of 32 with E8M0 scales. The
        activations that the checkpoint asks for do not matter: the kernels quantize them to INT8 per token.
        """
        stages = self.stages
        if any(stage.is_dynamic for stage in stages):
            return None
        kinds = [(stage.dtype, stage.qscheme) for stage in stages]
        if kinds == [("fp8_e4m3", "per_tensor"), ("int4", "per_channel")] and stages[1].ch_axis == 0:
            return INT4
        if kinds == [("fp4", "per_group")] and (stages[0].group_size, stages[0].scale_format) == (MXFP4.block, "e8m0"):
            return MXFP4
        return None


def weight_format(config: Mapping[str, Any]) -> WeightFormat | None:
    """Return the format of the weights, or None for a config of another kind, whatever its fields.

    config: a `quantization_config`, or one of its layer entries (`{"weight": ..., "input_tensors": ...}`).
    """
    if config.get("quant_method", "quark") != "quark":
        return None
    try:
        return LayerQuant.model_validate(config.get("global_quant_config", config)).weight_format
    except ValidationError:
        return None


def is_glob(entry: str) -> bool:
    """Return True if an entry of an exclude list is a glob, neither a plain name nor a `re:` pattern."""
    return not entry.startswith("re:") and any(character in entry for character in _GLOB_CHARACTERS)

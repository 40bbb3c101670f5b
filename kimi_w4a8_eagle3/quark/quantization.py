"""AMD Quark's entry in config.json, `quantization_config`: the format of the weights, and the modules without one."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from ..base.errors import KimiError
from .weight_format import INT4, MXFP4, WeightFormat

_GLOB_CHARACTERS = "*?["
_WRAPPER_PREFIX = "language_model."


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


class QuarkExport(BaseModel):
    pack_method: str | None = None


class QuantizationConfig(BaseModel):
    """The `quantization_config` of config.json; fields that no check needs are ignored."""

    quant_method: str = ""
    format: str | None = None
    global_quant_config: LayerQuant | None = None
    layer_quant_config: dict[str, LayerQuant] | None = None
    exclude: list[str] | None = None
    export: QuarkExport | None = None

    @property
    def weight_format(self) -> WeightFormat | None:
        """The format of layers without an entry of their own, or None if the kernels do not compute it."""
        return (
            self.global_quant_config.weight_format
            if self.quant_method == "quark" and self.global_quant_config
            else None
        )

    def excludes(self) -> ExcludeRules:
        """Return the exclude list compiled for many lookups."""
        return ExcludeRules(self.exclude or [])


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


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the `quantization_config`, at the top or in `text_config`."""
    text = config.get("text_config")
    found = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    return found if isinstance(found, dict) else None


def is_packed_int4(quantization: dict[str, Any]) -> bool:
    """Return True for compressed-tensors' symmetric INT4 in groups, the format of moonshotai/Kimi-K2.5."""
    groups = quantization.get("config_groups")
    weights = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, dict) else []
    return (
        quantization.get("quant_method") == "compressed-tensors"
        and quantization.get("format") == "pack-quantized"
        and bool(weights)
        and all(w.get("num_bits") == 4 and w.get("type") == "int" and w.get("symmetric") for w in weights)
    )


def is_glob(entry: str) -> bool:
    """Return True if an entry of an exclude list is a glob, neither a plain name nor a `re:` pattern."""
    return not entry.startswith("re:") and any(character in entry for character in _GLOB_CHARACTERS)


class ExcludeRules:
    """The modules that a Quark `exclude` list leaves unquantized.

    An entry is a module name, a `re:` pattern (matched from the start of the name, as SGLang and vLLM do) or a glob (as
    Quark itself matches). A multimodal wrapper's prefix `language_model.` may be present or absent on both sides.
    """

    def __init__(self, patterns: list[str]) -> None:
        self._names = {p.removeprefix(_WRAPPER_PREFIX) for p in patterns if not p.startswith("re:")}
        globs = [fnmatch.translate(p) for p in self._names if is_glob(p)]
        try:
            regexes = [re.compile(p[3:]).pattern for p in patterns if p.startswith("re:")]
        except re.error as error:
            raise KimiError(
                f"exclude pattern is not a regular expression: {error}", expected="Python syntax after 're:'"
            ) from error
        self._pattern = re.compile("|".join(f"(?:{p})" for p in globs + regexes)) if globs or regexes else None

    def __contains__(self, module: str) -> bool:
        short = module.removeprefix(_WRAPPER_PREFIX)
        if short in self._names:
            return True
        return self._pattern is not None and bool(self._pattern.match(module) or self._pattern.match(short))

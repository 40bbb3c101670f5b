"""Model sizes and AMD Quark's quantization entry from a checkpoint's config.json, typed and validated."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import AliasChoices, BaseModel, Field, PositiveInt, ValidationError

from ..base.errors import KimiError
from .weight_format import INT4, MXFP4, WeightFormat

_GLOB_CHARACTERS = "*?["
_WRAPPER_PREFIX = "language_model."
M = TypeVar("M", bound=BaseModel)


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


class TextShape(BaseModel):
    """Sizes of a DeepSeek-V3-style text model, with the names of its config.json."""

    hidden_size: PositiveInt
    vocab_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    intermediate_size: PositiveInt | None = None
    n_routed_experts: int = 0
    moe_intermediate_size: PositiveInt | None = None
    first_k_dense_replace: int = 0
    moe_layer_freq: PositiveInt = 1

    @property
    def moe_layers(self) -> list[int]:
        """Layers whose MLP is a mixture of experts."""
        if not self.n_routed_experts or self.moe_intermediate_size is None:
            return []
        first, step = self.first_k_dense_replace, self.moe_layer_freq
        return [layer for layer in range(first, self.num_hidden_layers) if layer % step == 0]


class EagleConfig(BaseModel):
    eagle_aux_hidden_state_layer_ids: list[int] | None = None


# Draft classes that SGLang's EAGLE3 worker feeds with captured hidden states of a DeepSeek-style target.
MHA_DRAFT, MLA_DRAFT = "LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"


class LatentShape(BaseModel):
    """Sizes of DeepSeek's multi-head latent attention, with the names of config.json."""

    q_lora_rank: PositiveInt
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt


class DraftShape(BaseModel):
    """Sizes of an EAGLE3 draft, with the names of its config.json.

    mla: sizes of latents, if the draft's KV cache stores latents like the target's; None for keys and values of heads.
    fc_norm: each captured state has a norm of its own before `fc`.
    draft_vocab_size: rows of its output head, None for the target's head.
    names_vocabulary: config.json has that field, even if it is null.
    """

    architectures: list[str] = Field(default_factory=list)
    hidden_size: PositiveInt
    vocab_size: PositiveInt
    num_hidden_layers: PositiveInt = 1
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    intermediate_size: PositiveInt | None = None
    mla: LatentShape | None = None
    fc_norm: bool = Field(default=False, validation_alias=AliasChoices("fc_norm", "use_aux_norm"))
    draft_vocab_size: PositiveInt | None = None
    names_vocabulary: bool = True
    target_hidden_size: PositiveInt | None = None
    tie_word_embeddings: bool = False
    eagle_config: EagleConfig = Field(default_factory=EagleConfig)


class ModelConfig(BaseModel):
    """A target's config.json: the text model's sizes and the quantization, wherever a wrapper keeps them.

    tower_layers: layers of a Kimi-K2.5 vision tower; None where the model has none, or is served without it.
    """

    architectures: list[str] = Field(default_factory=list)
    text: TextShape
    tower_layers: PositiveInt | None = None
    quantization: QuantizationConfig | None = None


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raise KimiError for a missing or unreadable file and for other JSON."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        remedy = "fetch the checkpoint again"
        raise KimiError(f"{path.name} is missing", str(path), "a Hugging Face model directory", remedy) from None
    except (OSError, ValueError, RecursionError) as error:
        what = f"{path.name} cannot be read: {error}"
        raise KimiError(what, str(path), "a JSON object", "fetch the file again") from error
    if not isinstance(content, dict):
        raise KimiError(f"{path.name} contains a JSON {type(content).__name__}", str(path), "a JSON object")
    return content


def read_model_config(model_dir: Path) -> ModelConfig:
    """Read and validate a target's config.json; raise KimiError naming each field that is missing or wrong."""
    path = model_dir / "config.json"
    raw = read_json(path)
    text = raw.get("text_config")
    text = text if isinstance(text, dict) else raw
    content = {"architectures": raw.get("architectures") or [], "text": text, "quantization": quantization_of(raw)}
    vision = raw.get("vision_config")
    if raw.get("model_type") == "kimi_k25" and isinstance(vision, dict) and not raw.get("language_model_only"):
        content["tower_layers"] = vision.get("num_hidden_layers", vision.get("vt_num_hidden_layers", 27))
    return _validate(ModelConfig, content, path)


def read_draft_config(draft_dir: Path) -> DraftShape:
    """Read and validate a draft's config.json; raise KimiError naming each field that is missing or wrong."""
    path = draft_dir / "config.json"
    return draft_shape(read_json(path), path)


def draft_shape(config: Mapping[str, Any], where: Path) -> DraftShape:
    """Return a draft's sizes from its config.json, which was read from `where`; a null counts as absent."""
    fields = config.get("text_config", config)
    content = {key: value for key, value in fields.items() if value is not None}
    content["names_vocabulary"] = "draft_vocab_size" in fields
    if MLA_DRAFT in content.get("architectures", ()):
        content["mla"] = content
    return _validate(DraftShape, content, where)


def _validate(kind: type[M], content: dict[str, Any], path: Path) -> M:
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        fields = [f"{'.'.join(map(str, e['loc']))}: {e['msg'].lower()}" for e in error.errors()]
        raise KimiError(
            f"{path.name} is not usable: {'; '.join(fields[:4])}" + (" ..." if len(fields) > 4 else ""),
            str(path),
            "the fields of a Hugging Face model config",
        ) from error

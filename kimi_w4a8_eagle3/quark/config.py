"""Sizes and quantization of a target, and sizes of a draft, from config.json, typed and validated."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import AliasChoices, BaseModel, Field, PositiveInt, ValidationError

from ..base.errors import KimiError
from ..base.files import read_json
from .quantization import LayerQuant, is_glob
from .weight_format import WeightFormat

M = TypeVar("M", bound=BaseModel)
_WRAPPER_PREFIX = "language_model."


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


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Return True for a draft's config.json that names a class of EAGLE3."""
    return not {MHA_DRAFT, MLA_DRAFT}.isdisjoint(config.get("architectures") or ())


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
        quant = self.global_quant_config if self.quant_method == "quark" else None
        return quant.weight_format if quant else None


class ModelConfig(BaseModel):
    """A target's config.json: the text model's sizes and the quantization, wherever a wrapper keeps them.

    tower_layers: layers of a Kimi-K2.5 vision tower; None where the model has none, or is served without it.
    """

    architectures: list[str] = Field(default_factory=list)
    text: TextShape
    tower_layers: PositiveInt | None = None
    quantization: QuantizationConfig | None = None


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


def draft_shape(config: Mapping[str, Any], where: Path) -> DraftShape:
    """Return a draft's sizes from its config.json, which was read from `where`; a null counts as absent.

    Raises KimiError naming each field that is missing or wrong.
    """
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

"""Memory of a served model on each GPU: weights by kind, KV pools, graphs and reserve, computed from configs.

Weights are split over TP as in SGLang: column- and row-parallel matrices by `tp`. Latent down-projections, router
gates, norms and the vision tower stay whole on every rank. With DP attention the target's attention and embedding, the
draft and both KV caches are split over `tp / dp` ranks only, and each rank's pool holds its own requests.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from ..base.errors import KimiError
from ..base.files import read_json
from ..base.installed import operator_dir
from ..base.nearest import nearest
from ..gates import read_gates
from ..machine.aiter_regime import Regime
from ..machine.hardware import Gpu
from ..machine.page_guard import KvShape, PagedKernel, kv_shape, paged_kernels
from ..machine.pool import Budget, PoolDecision, decide
from ..quark.config import draft_shape, is_packed_int4, quantization_of
from .arguments import attention_tp, fraction, number
from .schema import ArgValue, Recipe

# SGLang's own estimate of graph memory: 2 MiB per captured request, and 1.5 GiB for an MLA model's prefill graphs.
GRAPH_BYTES_PER_REQUEST = 2 << 20
GRAPH_BYTES_PER_REQUEST_AND_GROUP = 3 << 20  # of padding with DP attention
GRAPH_BYTES_MLA_PREFILL = 3 << 29
GRAPH_MAX_REQUESTS = 512
# SGLang's estimate of activations: per token of a prefill chunk, fixed, and per rank. A picture token is four patches,
# whose activations in the vision tower are a tenth of that.
ACTIVATION_BYTES_PER_TOKEN = 3 << 19
ACTIVATION_BYTES, ACTIVATION_BYTES_PER_RANK = 1 << 29, 1 << 27
PICTURE_CACHE_BYTES = 100 << 20  # SGLANG_VLM_CACHE_SIZE_MB, which SGLang takes out of the KV pool
# SGLang multiplies the memory fraction by this with AITER's attention and a longer context (attention_hook.py), unless
# the variable is set.
AITER_SCALE, AITER_SCALE_CONTEXT = 0.85, 8192
_DENSE = ("attention", "dense MLP", "shared experts")  # kinds of weights that KIMI_DENSE_FP8 quantizes
_FP8_BYTES = {"off": 0, "prefill": 1, "all": -1}  # that each of their elements takes more, by KIMI_DENSE_FP8
_STORED_KV_B = 2  # kv_b, and its two halves in the layout that MLA decode absorbs
HONOR_FRACTION = "SGLANG_AITER_HONOR_EXPLICIT_MEM_FRACTION"


@dataclass(frozen=True)
class ModelCard:
    """A model's config and the width of its stored weights.

    bits: width by kind of weight (as in `target_weights` and `draft_weights`) where it differs from `other_bits`.
    """

    name: str
    config: dict[str, Any]
    routed_expert_bits: float
    other_bits: float
    bits: dict[str, float] = field(default_factory=dict)

    @classmethod
    def packaged(cls, name: str) -> ModelCard:
        """Load the card `launch/models/<name>.json`."""
        folder = operator_dir("launch/models")
        names = sorted(path.stem for path in folder.glob("*.json"))
        if name not in names:
            raise KimiError(f"unknown model card {name!r}{nearest(name, names)}", expected=", ".join(names))
        table = json.loads((folder / f"{name}.json").read_text())
        return cls(name, table["config"], table["routed_expert_bits"], table["other_bits"], table.get("bits", {}))

    @classmethod
    def of(cls, path: str, revision: str, name: str | None) -> ModelCard:
        """Return the served model's card: config.json at `path` or in the Hub's cache, else the packaged card.

        Without a name the card is empty if there is no config.json.
        """
        folder = Path(path).expanduser()
        if (folder / "config.json").is_file():
            return cls.from_directory(folder)
        if path.count("/") == 1 and not path.startswith(("/", ".", "~")):
            cached = try_to_load_from_cache(path, "config.json", revision=revision)
            if isinstance(cached, str):
                return cls.from_directory(Path(cached).parent)
        return cls.packaged(name) if name else cls(path, {}, 16, 16)

    @classmethod
    def from_directory(cls, path: Path) -> ModelCard:
        """Make the card of a downloaded checkpoint from its config.json, with the expert width by its quantization."""
        config = read_json(path / "config.json")
        return cls(path.name, config, _expert_bits(config), 16)


def target_weights(card: ModelCard, tp: int, attention_tp: int | None = None, dense_fp8: str = "off") -> dict[str, int]:
    """Return the bytes per rank, by kind, of a MoE model with MLA, such as Kimi-K2.5.

    dense_fp8: as KIMI_DENSE_FP8, which leaves a model alone that has one of these kinds quantized.
    """
    text = card.config.get("text_config", card.config)
    try:
        parts = _target_elements(text, tp, attention_tp or tp)
    except (KeyError, TypeError) as error:
        raise KimiError(f"config.json lacks sizes: {error}", card.name, expected="a MoE model like Kimi-K2.5") from None
    width = card.other_bits / 8
    weights = {kind: math.ceil(count * card.bits.get(kind, card.other_bits) / 8) for kind, count in parts.items()}
    if all(card.bits.get(kind, card.other_bits) == 16 for kind in _DENSE):
        # Norms and the absorbed halves of kv_b stay. The scales take 0.01 % of all.
        products = text["num_hidden_layers"] * latent_attention(text, attention_tp or tp, text["hidden_size"])
        for kind, elements in {**parts, "attention": products}.items():
            weights[kind] += _FP8_BYTES[dense_fp8] * int(elements) if kind in _DENSE else 0
    moe_layers = text["num_hidden_layers"] - text["first_k_dense_replace"]
    experts = moe_layers * text["n_routed_experts"]
    inter = math.ceil(text["moe_intermediate_size"] / tp)
    weights["routed experts"] = int(experts * 3 * text["hidden_size"] * inter * card.routed_expert_bits / 8)
    if card.routed_expert_bits == 4:
        weights["expert scales"] = experts * (2 * inter + text["hidden_size"]) * 4  # one float32 per output channel
    weights["vision"] = math.ceil(_vision_elements(card.config.get("vision_config"), text["hidden_size"]) * width)
    return {kind: size for kind, size in weights.items() if size}


def draft_weights(card: ModelCard, tp: int) -> dict[str, int]:
    """Return the bytes per rank of an EAGLE3 draft: one layer over [embedding, hidden], `fc` and lm_head."""
    d = draft_shape(card.config, Path(card.name))
    hidden, heads = d.hidden_size, d.num_attention_heads
    fc: float = 3 * (d.target_hidden_size or hidden) * hidden  # SGLang splits it only for MLA drafts
    if d.mla:
        sizes = {**d.mla.model_dump(), "num_attention_heads": heads}
        attention, fc = latent_attention(sizes, tp, hidden, inputs=2, kv_b_copies=_STORED_KV_B), fc / tp
    else:
        head = d.head_dim or hidden // heads
        kv_heads = max((d.num_key_value_heads or heads) / tp, 1)
        attention = 2 * hidden * (heads / tp + 2 * kv_heads) * head + heads / tp * head * hidden
    layer = attention + 3 * hidden * (d.intermediate_size or 0) / tp
    lm_head = (d.draft_vocab_size or d.vocab_size) * hidden / tp
    layers = layer * d.num_hidden_layers * card.bits.get("draft layer", card.other_bits)
    return {"draft": math.ceil((layers + (fc + lm_head) * card.other_bits) / 8)}


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one GPU that serves a recipe, in bytes.

    budget: the bytes that weights and KV take. sizing: the bytes by which the engine sizes its pool.
    working: the engine's own estimate beside weights and KV; includes activations if a chunk size is set.
    """

    recipe: str
    gpu: Gpu
    tp: int
    weights: dict[str, int]
    target_kv: KvShape
    draft_kv: KvShape | None
    budget: Budget
    sizing: Budget
    kernels: list[PagedKernel]
    verdict: PoolDecision
    working: dict[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens of the pool that the engine makes with the verdict's arguments."""
        return min(self.verdict.max_total_tokens, self.sizing.tokens(self.verdict.fraction))

    @property
    def segments(self) -> dict[str, int]:
        """Every part of the memory in allocation order; the parts sum to the GPU's HBM."""
        parts = dict(self.weights)
        parts["target KV"] = self.tokens * self.target_kv.bytes_per_token
        if self.draft_kv is not None:
            parts["draft KV"] = self.tokens * self.draft_kv.bytes_per_token
        parts |= self.working
        parts["reserve"] = self.gpu.hbm_bytes - sum(parts.values())
        return parts

    def requests(self, input_len: int = 10240, output_len: int = 512) -> int:
        """Return how many requests of this length fit the KV pool at once."""
        return self.tokens // (input_len + output_len)


def make_plan(
    recipe: Recipe,
    args: Mapping[str, ArgValue],
    gpu: Gpu,
    regime: Regime,
    target: ModelCard | None = None,
    draft: ModelCard | None = None,
) -> MemoryPlan:
    """Return the memory plan of `recipe` with engine arguments `args`; cards are packaged ones unless given.

    Raises KimiError when the recipe names no model card or the weights do not fit.
    """
    if target is None and recipe.model.card is None:
        raise KimiError(f"recipe {recipe.name!r} names no model card", expected="model.card, or a model directory")
    if target is None:
        path = str(args.get("model-path", recipe.model.repo))
        target = ModelCard.of(path, recipe.model.revision, str(recipe.model.card))
    if draft is None and recipe.draft is not None and recipe.draft.card is not None:
        path = str(args.get("speculative-draft-model-path", recipe.draft.repo))
        draft = ModelCard.of(path, recipe.draft.revision, recipe.draft.card)
    tp = number(args, "tp-size", 1)
    page_size = number(args, "page-size", 1)
    split = attention_tp(args)
    dense_fp8 = read_gates(recipe.environment).get("KIMI_DENSE_FP8") or "off"
    weights = target_weights(target, tp, split, dense_fp8) | (draft_weights(draft, split) if draft else {})
    target_kv = kv_shape(target.config, split, _kv_bytes(args, "kv-cache-dtype"))
    draft_width = _kv_bytes(args, "speculative-draft-kv-cache-dtype")
    draft_kv = kv_shape(draft.config, split, draft_width) if draft else None
    shapes = [shape for shape in (target_kv, draft_kv) if shape is not None]
    kernels = paged_kernels(shapes, regime, arch=gpu.arch)
    budget = Budget(gpu.hbm_bytes, sum(weights.values()), sum(shape.bytes_per_token for shape in shapes), page_size)
    working = _working(args, tp, target.config)
    sizing = _sizing(budget, target, target_kv, draft_kv, args, recipe.environment)
    most = min(recipe.options.memory_ceiling, int((1 - sum(working.values()) / gpu.hbm_bytes) * 1000) / 1000)
    asked = args.get("mem-fraction-static", "auto")
    ceiling = most if asked == "auto" else fraction(args, "mem-fraction-static", most)
    verdict = decide(budget, kernels, regime, ceiling, sizing)
    return MemoryPlan(recipe.name, gpu, tp, weights, target_kv, draft_kv, budget, sizing, kernels, verdict, working)


def short_pool(plan: MemoryPlan, args: Mapping[str, ArgValue]) -> str | None:
    """Return a sentence if the pool cannot hold one request of the context length that the arguments set."""
    context = number(args, "context-length", 1)
    tokens = min(plan.tokens, number(args, "max-total-tokens", plan.tokens))
    if tokens >= context:
        return None
    return f"the KV pool of {tokens:,} tokens is smaller than one context of {context:,}; shorten context-length"


def _sizing(
    budget: Budget,
    target: ModelCard,
    target_kv: KvShape,
    draft_kv: KvShape | None,
    args: Mapping[str, ArgValue],
    environment: Mapping[str, str],
) -> Budget:
    """Return the budget by which SGLang sizes the pool: it scales the fraction and underrates the draft's KV bytes."""
    # It takes a draft layer to be as large as a target layer (pool_configurator.py).
    draft_layers = draft_kv.layers if draft_kv else 0
    cell = int(target_kv.bytes_per_token * (1 + draft_layers / target_kv.layers))
    text = target.config.get("text_config", target.config)
    context = number(args, "context-length", text.get("max_position_embeddings", sys.maxsize))
    honored = environment.get(HONOR_FRACTION, "").lower() in ("1", "true", "yes", "y")
    scaled = args.get("attention-backend") == "aiter" and context > AITER_SCALE_CONTEXT and not honored
    weights = budget.weight_bytes + (PICTURE_CACHE_BYTES if target.config.get("vision_config") else 0)
    return Budget(budget.hbm_bytes, weights, cell, budget.page_size, AITER_SCALE if scaled else 1.0)


def _working(args: Mapping[str, ArgValue], tp: int, config: Mapping[str, Any]) -> dict[str, int]:
    requests = number(args, "cuda-graph-max-bs-decode", GRAPH_MAX_REQUESTS)
    working = {"graphs": requests * GRAPH_BYTES_PER_REQUEST + GRAPH_BYTES_MLA_PREFILL}
    groups = tp // attention_tp(args)
    if groups > 1:
        working["graphs"] += requests * groups * GRAPH_BYTES_PER_REQUEST_AND_GROUP
    if "chunked-prefill-size" in args:
        chunk = max(number(args, "chunked-prefill-size", 2048), 2048)
        fixed = ACTIVATION_BYTES + tp * ACTIVATION_BYTES_PER_RANK
        working["activations"] = chunk * ACTIVATION_BYTES_PER_TOKEN + fixed
    if config.get("vision_config"):
        working["picture cache"] = PICTURE_CACHE_BYTES
    return working


def _kv_bytes(args: Mapping[str, ArgValue], name: str) -> int:
    return 1 if str(args.get(name, args.get("kv-cache-dtype", "auto"))).startswith("fp8") else 2


def _target_elements(c: Mapping[str, Any], tp: int, attention_tp: int) -> dict[str, float]:
    """Return the stored elements per rank, by kind, without the routed experts and the vision tower."""
    hidden, layers = c["hidden_size"], c["num_hidden_layers"]
    parts = other_matrices(c, tp)
    lm_head = parts.pop("lm_head")
    embeddings = c["vocab_size"] * hidden / attention_tp + (0 if c.get("tie_word_embeddings") else lm_head)
    stored = latent_attention(c, attention_tp, hidden, kv_b_copies=_STORED_KV_B) + 2 * hidden  # and two norms
    return {"attention": layers * stored, **parts, "embeddings, lm_head": embeddings}


def other_matrices(c: Mapping[str, Any], tp: int) -> dict[str, float]:
    """Return the elements per rank, by kind, that a step reads beside attention and routed experts."""
    hidden, dense_layers = c["hidden_size"], c["first_k_dense_replace"]
    moe_layers = c["num_hidden_layers"] - dense_layers
    return {
        "dense MLP": dense_layers * 3 * hidden * c["intermediate_size"] / tp,
        "shared experts": moe_layers * c["n_shared_experts"] * 3 * hidden * c["moe_intermediate_size"] / tp,
        "router": moe_layers * c["n_routed_experts"] * hidden,
        "lm_head": c["vocab_size"] * hidden / tp,
    }


def latent_attention(c: Mapping[str, Any], tp: int, hidden: int, inputs: int = 1, kv_b_copies: int = 1) -> float:
    """Return the elements per rank of one MLA layer over `inputs` vectors of `hidden`.

    The low-rank down projections are whole on every rank. kv_b_copies: 1 for what a step reads, `_STORED_KV_B` for what
    SGLang stores.
    """
    heads, q_rank = c["num_attention_heads"], c.get("q_lora_rank") or 0
    latents = inputs * hidden * (q_rank + c["kv_lora_rank"] + c["qk_rope_head_dim"])
    q = (q_rank or hidden) * heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    kv_b = c["kv_lora_rank"] * heads * (c["qk_nope_head_dim"] + c["v_head_dim"])
    out = heads * c["v_head_dim"] * hidden
    return latents + (q + kv_b_copies * kv_b + out) / tp


def _expert_bits(config: Mapping[str, Any]) -> float:
    """Return the stored bits per routed-expert weight: Moonshot's INT4 (16-bit scale per 32), INT4, MXFP4, FP8."""
    found = quantization_of(config) or {}
    if is_packed_int4(found):
        return 4.5
    widths = {"int4": 4.0, "fp4": 4.25, "fp8": 8.0}
    return next((bits for name, bits in widths.items() if name in json.dumps(found).lower()), 16.0)


def _vision_elements(vision: Mapping[str, Any] | None, text_hidden: int) -> int:
    """Return the elements of a ViT and of the two-layer projector into the text width; whole on every rank."""
    vision = {name.removeprefix("vt_"): value for name, value in (vision or {}).items()}  # both spellings exist
    if "num_hidden_layers" not in vision:
        return 0
    hidden, inter = vision["hidden_size"], vision["intermediate_size"]
    merged = hidden * math.prod(vision.get("merge_kernel_size", [1]))
    return vision["num_hidden_layers"] * (4 * hidden**2 + 2 * hidden * inter) + merged**2 + merged * text_hidden

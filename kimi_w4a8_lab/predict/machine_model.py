"""Least cost of a step on one GPU of a tensor-parallel group: bytes, operations and collectives of Kimi-K2.5.

All counts come from the architecture's shapes (`launch/models/*.json`) and data-sheet peaks. Every predicted time is
linear in three unknowns, which are fitted by least squares: layer_s, the time a layer takes however little work it has
(kernel launches, small all-reduces), per step; decode_cost, 1 / the share of the peaks that decode steps reach; and
prefill_cost, 1 / the share of the peaks that prefill reaches.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from kimi_w4a8_eagle3.base.installed import operator_dir
from kimi_w4a8_eagle3.machine.hardware import GPUS, Gpu
from kimi_w4a8_eagle3.moe.contract import MoeShape
from kimi_w4a8_eagle3.recipe.memory_plan import latent_attention, other_matrices

Terms = NDArray[np.float64]  # seconds per unit of (layer_s, decode_cost, prefill_cost); layer_s itself counts layers

# Dense peaks of the MI325X data sheet; operations per second. One xGMI link joins every two of the eight GPUs.
INT8_OPS, BF16_OPS = 2614.9e12, 1307.4e12
LINK_BYTES = 64e9  # per second, each way
DRAFT = "kimi-k2.5-eagle3"  # the published draft
BF16_BYTES = 2.0
MLA_HEADS = 16  # of AITER's decode kernel; fewer are repeated, and more take several passes (aiter/mla.py)


@dataclass(frozen=True)
class Precision:
    """Storage and arithmetic of routed experts: bytes per weight and peak operations per second.

    Scales are not counted, because the checkpoints of the recipes have one a row.
    """

    bytes_per_weight: float
    ops: float


PRECISIONS = {
    "w4a8": Precision(0.5, INT8_OPS),
    "w4a16": Precision(0.5, BF16_OPS),
    "w8a8": Precision(1.0, INT8_OPS),
}


class Shapes(BaseModel, frozen=True):
    """Sizes of Kimi-K2.5, by the names of its config, and of its draft, whose names begin with `draft_`."""

    hidden: int = Field(alias="hidden_size")
    layers: int = Field(alias="num_hidden_layers")
    dense_layers: int = Field(alias="first_k_dense_replace")
    dense_inner: int = Field(alias="intermediate_size")
    expert_inner: int = Field(alias="moe_intermediate_size")
    experts: int = Field(alias="n_routed_experts")
    top_k: int = Field(alias="num_experts_per_tok")
    shared_experts: int = Field(alias="n_shared_experts")
    heads: int = Field(alias="num_attention_heads")
    q_rank: int = Field(alias="q_lora_rank")
    kv_rank: int = Field(alias="kv_lora_rank")
    nope: int = Field(alias="qk_nope_head_dim")
    rope: int = Field(alias="qk_rope_head_dim")
    v_head: int = Field(alias="v_head_dim")
    vocab: int = Field(alias="vocab_size")
    draft_inner: int = Field(alias="draft_intermediate_size")
    draft_heads: int = Field(alias="draft_num_attention_heads")
    draft_kv_heads: int = Field(alias="draft_num_key_value_heads")
    draft_head_dim: int = 0  # 0: the draft's attention is MLA, with the target's sizes

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers


@cache
def kimi(draft_card: str = DRAFT) -> Shapes:
    """Load the shapes from `launch/models/`, by default with the draft of the published recipes."""
    folder = operator_dir("launch/models")
    target = json.loads((folder / "kimi-k2.5-w4a8.json").read_text())["config"]["text_config"]
    draft = json.loads((folder / f"{draft_card}.json").read_text())["config"]
    return Shapes.model_validate(target | {f"draft_{key}": value for key, value in draft.items()})


@dataclass(frozen=True)
class Cluster:
    """GPUs of one engine. groups: of GPUs with requests of their own, more than one with DP attention.

    draft: the card of its draft.
    """

    gpu: Gpu = GPUS["mi325x"]
    tp: int = 8
    groups: int = 1
    draft: str = DRAFT

    @property
    def attention_tp(self) -> int:
        """GPUs over which attention and the draft are split."""
        return self.tp // self.groups

    @property
    def shapes(self) -> Shapes:
        return kimi(self.draft)

    def in_a_group(self, requests: int) -> float:
        """Return the requests of the fullest group."""
        return max(requests / self.groups, 1.0)

    @property
    def bandwidth(self) -> float:
        """HBM bytes per second of one GPU."""
        return self.gpu.hbm_tb_s * 1e12

    def all_reduce_s(self, message: float) -> float:
        """Return the least seconds of all-reduces of `message` bytes.

        Each GPU sends and receives 2 (tp - 1) / tp of them, over its tp - 1 links to the other GPUs of its engine.
        """
        return 2 * message / self.tp / LINK_BYTES


def moe_shape(shapes: Shapes, cluster: Cluster) -> MoeShape:
    """Return the shape of one MoE layer on one GPU."""
    return MoeShape(shapes.experts, shapes.hidden, shapes.expert_inner // cluster.tp, shapes.top_k)


def experts_touched(tokens: float, shapes: Shapes) -> float:
    """Return the expected number of distinct experts for `tokens` tokens under uniform routing."""
    return shapes.experts * (1 - (1 - shapes.top_k / shapes.experts) ** tokens)


@cache
def attention_weights(shapes: Shapes, tp: int, inputs: int = 1) -> float:
    """Return the attention weights of one layer that a step reads on one GPU.

    inputs: vectors that a token's input joins, two in a draft.
    """
    return latent_attention(shapes.model_dump(by_alias=True), tp, shapes.hidden, inputs)


@cache
def fixed_weights(shapes: Shapes, tp: int, attention_tp: int | None = None) -> float:
    """Return the BF16 weights that every step reads, over all layers, with the output head."""
    attention = shapes.layers * attention_weights(shapes, attention_tp or tp)
    return attention + sum(other_matrices(shapes.model_dump(by_alias=True), tp).values())


def expert_weights(shapes: Shapes, tp: int) -> float:
    """Return the weights of one routed expert on one GPU."""
    return 3 * shapes.hidden * shapes.expert_inner / tp


def _mla_passes(cluster: Cluster) -> float:
    """Return how often AITER's kernel reads a request's latents: it computes 16 heads at once."""
    return max(cluster.shapes.heads / cluster.attention_tp / MLA_HEADS, 1.0)


def decode_bytes(requests: int, tokens_each: float, context: float, precision: Precision, cluster: Cluster) -> float:
    """Return the bytes of weights, touched experts and KV that one decode pass reads on a GPU."""
    s, tokens = cluster.shapes, requests * tokens_each
    # MLA keeps one latent vector per token, replicated on every GPU. AITER's kernel reads it once for all tokens of a
    # request, but its matrix work takes about as long as one reading for each (docs/perf/machine-model.md). With one
    # reading alone the model falls 22% short of the published ITL.
    own = cluster.in_a_group(requests) * tokens_each
    passes = own * _mla_passes(cluster)
    kv_bytes = passes * context * s.layers * (s.kv_rank + s.rope) * BF16_BYTES
    expert = expert_weights(s, cluster.tp)
    touched = experts_touched(tokens, s) * expert * precision.bytes_per_weight * s.moe_layers
    return fixed_weights(s, cluster.tp, cluster.attention_tp) * BF16_BYTES + touched + kv_bytes


def decode_step(requests: int, tokens_each: int, context: float, precision: Precision, cluster: Cluster) -> Terms:
    """Return the cost of one target pass over `tokens_each` new tokens of each request (1: plain decode)."""
    s, tokens = cluster.shapes, requests * tokens_each
    expert = expert_weights(s, cluster.tp)
    own = cluster.in_a_group(requests) * tokens_each
    projections = s.layers * attention_weights(s, cluster.attention_tp)
    products = own * projections + tokens * (fixed_weights(s, cluster.tp, cluster.attention_tp) - projections)
    memory = decode_bytes(requests, tokens_each, context, precision, cluster) / cluster.bandwidth
    attention = own * context * s.layers * s.heads / cluster.attention_tp * 2 * (2 * s.kv_rank + s.rope)
    compute = (products * 2 + attention) / BF16_OPS + tokens * s.top_k * expert * 2 * s.moe_layers / precision.ops
    return np.array([s.layers, memory + compute, 0.0])


def _step_weights(cluster: Cluster) -> float:
    s, tp = cluster.shapes, cluster.attention_tp
    # Queries, keys and values are of two joined vectors. The output projection, last, writes one.
    rows = (2 * s.draft_heads + 2 * 2 * s.draft_kv_heads + s.draft_heads) * s.draft_head_dim
    attention = rows * s.hidden / tp if rows else attention_weights(s, tp, inputs=2)
    return attention + (3 * s.hidden * s.draft_inner + 3 * s.hidden * s.hidden + s.vocab * s.hidden) / tp


def draft_bytes(requests: int, context: float, cluster: Cluster) -> float:
    """Return the bytes that one draft step reads on a GPU: weights with the output head, and KV, in BF16."""
    shapes = cluster.shapes
    row = 2 * shapes.draft_kv_heads / cluster.attention_tp * shapes.draft_head_dim
    if not row:
        row = _mla_passes(cluster) * (shapes.kv_rank + shapes.rope)
    kv = cluster.in_a_group(requests) * context * row
    return (_step_weights(cluster) + kv) * BF16_BYTES


def draft_step(requests: int, context: float, cluster: Cluster) -> Terms:
    """Return the cost of one step of the one-layer draft with its output head, in BF16."""
    memory = draft_bytes(requests, context, cluster) / cluster.bandwidth
    compute = cluster.in_a_group(requests) * _step_weights(cluster) * 2 / BF16_OPS
    return np.array([1.0, memory + compute, 0.0])


def speculative_step(requests: int, steps: int, context: float, precision: Precision, cluster: Cluster) -> Terms:
    """Return the cost of a verify step and its draft steps; 0 steps are plain decoding."""
    verify = decode_step(requests, steps + 1, context, precision, cluster)
    return verify + steps * draft_step(requests, context, cluster) if steps else verify


def prefill(tokens: int, precision: Precision, cluster: Cluster, together: int = 1) -> Terms:
    """Return the cost of one prompt: matrix products, attention, and two all-reduces per layer.

    With DP attention each group prefills one of `together` prompts in a pass. SGLang then gathers by an all-reduce,
    too, because groups of unequal prompts are not padded.
    """
    s, prompts = cluster.shapes, min(together, cluster.groups)
    projections = s.layers * attention_weights(s, cluster.attention_tp)
    rest = fixed_weights(s, cluster.tp, cluster.attention_tp) - s.vocab * s.hidden / cluster.tp - projections
    experts = prompts * tokens * s.top_k * expert_weights(s, cluster.tp) * 2 * s.moe_layers / precision.ops
    score = s.layers * s.heads / cluster.attention_tp * 2 * (s.nope + s.rope + s.v_head)
    own = tokens * (2 * projections + tokens / 2 * score)
    reduced = cluster.all_reduce_s(2 * s.layers * prompts * tokens * s.hidden * BF16_BYTES)
    return np.array([0.0, 0.0, (prompts * tokens * rest * 2 + own) / BF16_OPS + experts + reduced]) / prompts

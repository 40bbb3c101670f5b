"""The target in plain torch, for training and evaluation, with the arithmetic of SGLang's DeepSeek-V3.

Parameter names are those of the checkpoint, except that the routed experts of a layer are stacked into one tensor
(`mlp.experts.gate_up` [E, 2I, H], `mlp.experts.down` [E, H, I]); `checkpoint.py` splits and joins them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kimi_w4a8_lab.draft.layers import GatedMLP, LatentAttention, RMSNorm, yarn_frequencies

from .config import TargetConfig
from .experts import Experts

_SHORT = 512  # tokens of a row up to which torch's plain products train faster on a CPU than its fused attention


class Cache:
    """Keys and values of one generation run, room for `capacity` tokens."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._layers: dict[int, tuple[Tensor, Tensor, int]] = {}

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append [B, heads, T, d] and return everything so far."""
        if layer not in self._layers:
            room = [x.new_empty(*x.shape[:2], self.capacity, x.shape[3]) for x in (k, v)]
            self._layers[layer] = room[0], room[1], 0
        keys, values, begin = self._layers[layer]
        end = begin + k.shape[2]
        keys[:, :, begin:end], values[:, :, begin:end] = k, v
        self._layers[layer] = keys, values, end
        return keys[:, :, :end], values[:, :, :end]

    def keep(self, rows: Tensor) -> None:
        """Forget the other rows; bool [B]."""
        self._layers = {layer: (k[rows], v[rows], end) for layer, (k, v, end) in self._layers.items()}


class Attention(LatentAttention):
    """Multi-head latent attention with expanded keys and values."""

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, layer: int, cache: Cache | None
    ) -> Tensor:
        """x [B, T, hidden]; mask bool [B, 1, T, S], or None for plain causal attention."""
        q, k, v = self.qkv(x, rope)
        if cache is not None:
            k, v = cache.extend(layer, k, v)
        if self.training and mask is None and q.shape[2] <= _SHORT:
            return self.merged(_causal(q, k, v, self.scale))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale)
        return self.merged(out)


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention over [B, heads, T, d] by two batched products."""
    future = torch.full(q.shape[2:3] * 2, float("-inf"), dtype=q.dtype).triu(1)
    scores = torch.baddbmm(future, (q * scale).flatten(0, 1), k.flatten(0, 1).mT)
    return torch.bmm(scores.softmax(-1), v.flatten(0, 1)).view_as(q)


class Router(nn.Module):
    """`noaux_tc`: sigmoid scores; a bias that only takes part in the choice keeps the experts evenly used."""

    e_score_correction_bias: Tensor

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.c = config
        self.weight = nn.Parameter(torch.randn(config.experts, config.hidden) * config.hidden**-0.5)
        self.register_buffer("e_score_correction_bias", torch.zeros(config.experts))
        self.load: Tensor | None = None  # share of the tokens each expert got in the last forward, in training

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, hidden] -> weights float32 [T, top_k], expert ids int64 [T, top_k]."""
        with torch.autocast("cpu", enabled=False):
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
        ids = (scores.detach() + self.e_score_correction_bias).topk(self.c.top_k, -1).indices
        chosen = scores.gather(1, ids)
        if self.training:
            self.load = torch.bincount(ids.flatten(), minlength=self.c.experts) / x.shape[0]
        return chosen / chosen.sum(-1, keepdim=True) * self.c.routed_scale, ids

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Move the bias one step towards even load."""
        assert self.load is not None
        self.e_score_correction_bias += rate * torch.sign(self.load.mean() - self.load)


class MoE(nn.Module):
    """Routed experts plus one shared expert."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts = GatedMLP(config.hidden, config.moe_inter)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden]."""
        flat = x.flatten(0, 1)
        return self.experts(flat, *self.gate(flat)).view_as(x) + self.shared_experts(x)


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: TargetConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.input_layernorm = RMSNorm(config.hidden, config.eps)
        self.self_attn = Attention(config.latent)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.eps)
        dense = index < config.dense_layers
        self.mlp: GatedMLP | MoE = GatedMLP(config.hidden, config.dense_inter) if dense else MoE(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache | None) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), rope, mask, self.index, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class TargetModel(nn.Module):
    """The language model. `states[i]` of the result is the hidden state that enters layer i, which EAGLE3 captures."""

    frequencies: Tensor

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps)
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.frequencies = yarn_frequencies(config.latent)  # no buffer: it stays float32 whatever the model is cast to

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None, cache: Cache | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Tokens [B, T] -> logits [B, T, vocab] and the hidden states entering each layer, [B, T, hidden]."""
        if positions is None:
            positions = torch.arange(tokens.shape[1]).unsqueeze(0)
        angles = (positions[..., None].float() * self.frequencies).unsqueeze(1)
        rope = angles.cos(), angles.sin()
        x, states = self.embed_tokens(tokens), []
        if torch.is_autocast_enabled("cpu"):
            x = x.bfloat16()  # activations are BF16 in training too, as when served
        for layer in self.layers:
            states.append(x)
            x = layer(x, rope, mask, cache)
        return self.lm_head(self.norm(x)), states

    def routers(self) -> list[Router]:
        """The routers of all MoE layers."""
        return [layer.mlp.gate for layer in self.layers if isinstance(layer.mlp, MoE)]

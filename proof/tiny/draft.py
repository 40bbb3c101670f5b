"""The EAGLE3 drafts in plain torch: one layer over the target's captured states, unrolled for several steps.

At position i the draft sees token i+1 and the target's states of position i, and guesses token i+2. Step k of a
server's draft run continues from the draft's own hidden state; it attends to the target-fed keys up to i and to its own
k earlier keys. `Draft.forward` does this for all positions at once, which serves both training (EAGLE3's training-time
test) and evaluation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import DraftConfig, MlaDraftConfig, TargetConfig
from .model import Attention, GatedMLP, RMSNorm, yarn_frequencies


class DraftAttention(nn.Module):
    """Grouped-query attention over [embedding, state] (twice the hidden size in)."""

    def __init__(self, hidden: int, config: DraftConfig) -> None:
        super().__init__()
        self.c = config
        self.q_proj = nn.Linear(2 * hidden, config.heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, config.kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, config.kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.heads * config.head_dim, hidden, bias=False)

    def chain(self, x: Tensor, positions: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """x [B, T, 2 * hidden] -> [B, T, hidden]; see `attend`."""
        c = self.c
        q = rotate_halves(self._heads(self.q_proj(x), c.heads), positions, c.rope_theta)
        k = rotate_halves(self._heads(self.k_proj(x), c.kv_heads), positions, c.rope_theta)
        v = self._heads(self.v_proj(x), c.kv_heads)
        repeat = c.heads // c.kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        return self.o_proj(attend(q, k, v, past, c.head_dim**-0.5).transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.c.head_dim)).transpose(1, 2)


class MlaDraftAttention(Attention):
    """The target's kind of attention, over [embedding, state]."""

    def __init__(self, target: TargetConfig) -> None:
        super().__init__(target, inputs=2)
        self.frequencies = yarn_frequencies(self.c)

    def chain(self, x: Tensor, positions: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """x [B, T, 2 * hidden] -> [B, T, hidden]; see `attend`."""
        angles = positions[:, None].float() * self.frequencies
        return self.merged(attend(*self.qkv(x, (angles.cos(), angles.sin())), past, self.scale))


def attend(q: Tensor, k: Tensor, v: Tensor, past: list[tuple[Tensor, Tensor]], scale: float) -> Tensor:
    """[B, heads, T, d] each; appends this step's keys and values to `past`.

    Position t of step k sees the keys of step 0 at positions <= t - k's start, that is its own prefix, and of steps
    1..k only the entry that belongs to its own chain, which stands at the same t.
    """
    past.append((k, v))
    if len(past) == 1:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    length = q.shape[2]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    prefix = (q @ past[0][0].transpose(2, 3) * scale).float().masked_fill(future, float("-inf"))
    chain = torch.stack([(q * keys).sum(-1).float() * scale for keys, _ in past[1:]], -1)
    share = torch.cat([prefix, chain], -1).softmax(-1).to(v.dtype)
    out = share[..., :length] @ past[0][1]
    for i, (_, values) in enumerate(past[1:]):
        out = out + share[..., length + i, None] * values
    return out


def rotate_halves(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Llama's rotary embedding of [B, heads, T, d] at positions [T]."""
    half = x.shape[-1] // 2
    angles = positions[:, None].float() * theta ** -(torch.arange(half, dtype=torch.float32) / half)
    cos, sin = angles.cos(), angles.sin()
    a, b = x.float().split(half, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class DraftLayer(nn.Module):
    """The one decoder layer; `midlayer` in EAGLE3 checkpoints."""

    def __init__(self, target: TargetConfig, config: DraftConfig | MlaDraftConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(target.hidden, target.eps)
        self.hidden_norm = RMSNorm(target.hidden, target.eps)
        self.self_attn: DraftAttention | MlaDraftAttention
        if isinstance(config, MlaDraftConfig):
            self.self_attn = MlaDraftAttention(target)
        else:
            self.self_attn = DraftAttention(target.hidden, config)
        self.post_attention_layernorm = RMSNorm(target.hidden, target.eps)
        self.mlp = GatedMLP(target.hidden, config.inter)

    def forward(self, embeds: Tensor, hidden: Tensor, positions: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden], residual included."""
        both = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], -1)
        hidden = hidden + self.self_attn.chain(both, positions, past)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Draft(nn.Module):
    """EAGLE3 draft with its own lm_head; the embedding is the target's and is handed in."""

    def __init__(self, target: TargetConfig, config: DraftConfig | MlaDraftConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(len(config.captured) * target.hidden, target.hidden, bias=False)
        self.midlayer = DraftLayer(target, config)
        self.norm = RMSNorm(target.hidden, target.eps)
        self.lm_head = nn.Linear(target.hidden, target.vocab, bias=False)

    def forward(self, tokens: Tensor, captured: Tensor, embedding: Tensor, steps: int) -> list[Tensor]:
        """Hidden states of `steps` draft steps from every position; `logits` turns them into guesses.

        tokens int64 [B, T]; captured [B, T, 3 * hidden], the target's states of the same positions;
        embedding [vocab, hidden]. Entry k is [B, T - 2 - k, hidden]: at position i it knows the target's states up to
        i and the true tokens up to i + 1 + k, and guesses token i + 2 + k. (True tokens: a server's chain matters only
        as long as its own guesses were right.)
        """
        embeds = F.embedding(tokens, embedding)
        hidden = self.fc(captured)
        past: list[tuple[Tensor, Tensor]] = []
        out = []
        for k in range(steps):
            length = tokens.shape[1] - 2 - k
            past = [(key[:, :, :length], value[:, :, :length]) for key, value in past]
            shifted = embeds[:, k + 1 : k + 1 + length]
            hidden = self.midlayer(shifted, hidden[:, :length], torch.arange(k, k + length), past)
            out.append(hidden)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocab]."""
        return self.lm_head(self.norm(hidden))

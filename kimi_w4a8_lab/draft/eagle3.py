"""The EAGLE3 drafts in plain torch: one layer over the target's captured states, unrolled for several steps.

At position i the draft sees token i+1 and the target's states of position i, and guesses token i+2. Step k of a
server's draft run continues from the draft's own hidden state; it attends to the target-fed keys up to i and to its own
k earlier keys. `Draft.forward` does this for all positions at once, which serves both training (EAGLE3's training-time
test) and evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import GatedMLP, LatentAttention, LatentSizes, RMSNorm, rotate_halves, yarn_frequencies

Past = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class DraftSizes:
    """Sizes of a draft. captured: the target's layers whose incoming states it reads, in SGLang's way of counting.

    rows: of its output head; 0 for the target's head. latent: sizes of latent attention, or None for heads of their
    own, `heads` with `kv_heads` keys and values.
    """

    hidden: int
    target_hidden: int
    inter: int
    rows: int
    captured: tuple[int, ...]
    eps: float
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    latent: LatentSizes | None = None


class DraftAttention(nn.Module):
    """Grouped-query attention over [embedding, state] (twice the hidden size in)."""

    def __init__(self, sizes: DraftSizes) -> None:
        super().__init__()
        self.c = sizes
        self.q_proj = nn.Linear(2 * sizes.hidden, sizes.heads * sizes.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * sizes.hidden, sizes.kv_heads * sizes.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * sizes.hidden, sizes.kv_heads * sizes.head_dim, bias=False)
        self.o_proj = nn.Linear(sizes.heads * sizes.head_dim, sizes.hidden, bias=False)

    def chain(self, x: Tensor, positions: Tensor, past: Past) -> Tensor:
        """x [B, T, 2 * hidden] -> [B, T, hidden]; see `attend`."""
        c = self.c
        q = rotate_halves(self._heads(self.q_proj(x), c.heads), positions, c.rope_theta)
        k = rotate_halves(self._heads(self.k_proj(x), c.kv_heads), positions, c.rope_theta)
        v = self._heads(self.v_proj(x), c.kv_heads)
        k, v = (part.repeat_interleave(c.heads // c.kv_heads, 1) for part in (k, v))
        return self.o_proj(attend(q, k, v, past, c.head_dim**-0.5).transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.c.head_dim)).transpose(1, 2)


class MlaDraftAttention(LatentAttention):
    """The target's kind of attention, over [embedding, state]."""

    def __init__(self, sizes: LatentSizes) -> None:
        super().__init__(sizes, inputs=2)
        self.frequencies = yarn_frequencies(sizes)

    def chain(self, x: Tensor, positions: Tensor, past: Past) -> Tensor:
        """x [B, T, 2 * hidden] -> [B, T, hidden]; see `attend`."""
        angles = positions[:, None].float() * self.frequencies.to(x.device)
        return self.merged(attend(*self.qkv(x, (angles.cos(), angles.sin())), past, self.scale))


def attend(q: Tensor, k: Tensor, v: Tensor, past: Past, scale: float) -> Tensor:
    """[B, heads, T, d] each; appends this step's keys and values to `past`.

    Position t of step k sees the keys of step 0 at positions <= t - k's start, that is its own prefix, and of steps
    1..k only the entry that belongs to its own chain, which stands at the same t.
    """
    past.append((k, v))
    if len(past) == 1:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    length = q.shape[2]
    future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    prefix = (q @ past[0][0].transpose(2, 3) * scale).float().masked_fill(future, float("-inf"))
    chain = torch.stack([(q * keys).sum(-1).float() * scale for keys, _ in past[1:]], -1)
    share = torch.cat([prefix, chain], -1).softmax(-1).to(v.dtype)
    out = share[..., :length] @ past[0][1]
    for i, (_, values) in enumerate(past[1:]):
        out = out + share[..., length + i, None] * values
    return out


class DraftLayer(nn.Module):
    """The one decoder layer; `midlayer` in EAGLE3 checkpoints."""

    def __init__(self, sizes: DraftSizes) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(sizes.hidden, sizes.eps)
        self.hidden_norm = RMSNorm(sizes.hidden, sizes.eps)
        self.self_attn: DraftAttention | MlaDraftAttention
        self.self_attn = MlaDraftAttention(sizes.latent) if sizes.latent else DraftAttention(sizes)
        self.post_attention_layernorm = RMSNorm(sizes.hidden, sizes.eps)
        self.mlp = GatedMLP(sizes.hidden, sizes.inter)

    def forward(self, embeds: Tensor, hidden: Tensor, positions: Tensor, past: Past) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden], residual included."""
        both = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], -1)
        hidden = hidden + self.self_attn.chain(both, positions, past)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Draft(nn.Module):
    """EAGLE3 draft; the embedding is the target's and is handed in.

    proposed: target token of each row of a reduced head, int64 [rows], or None for a head of the whole vocabulary.
    """

    def __init__(self, sizes: DraftSizes, vocabulary: int, proposed: Tensor | None = None) -> None:
        super().__init__()
        self.sizes = sizes
        self.fc = nn.Linear(len(sizes.captured) * sizes.target_hidden, sizes.hidden, bias=False)
        self.midlayer = DraftLayer(sizes)
        self.norm = RMSNorm(sizes.hidden, sizes.eps)
        self.lm_head = nn.Linear(sizes.hidden, sizes.rows or vocabulary, bias=False)
        self.proposed, self.row_of = proposed, None
        if proposed is not None:
            self.row_of = torch.full((vocabulary,), -100).index_put((proposed,), torch.arange(len(proposed)))

    def forward(self, tokens: Tensor, captured: Tensor, embedding: Tensor, steps: int) -> list[Tensor]:
        """Hidden states of `steps` draft steps from every position; `logits` turns them into guesses.

        tokens int64 [B, T]; captured [B, T, 3 * hidden], the target's states of the same positions;
        embedding [vocab, hidden]. Entry k is [B, T - 2 - k, hidden]: at position i it knows the target's states up to
        i and the true tokens up to i + 1 + k, and guesses token i + 2 + k. (True tokens: a server's chain matters only
        as long as its own guesses were right.)
        """
        embeds = F.embedding(tokens, embedding)
        hidden = self.fc(captured)
        past: Past = []
        out = []
        for k in range(steps):
            length = tokens.shape[1] - 2 - k
            past = [(key[:, :, :length], value[:, :, :length]) for key, value in past]
            shifted, positions = embeds[:, k + 1 : k + 1 + length], torch.arange(k, k + length, device=tokens.device)
            hidden = self.midlayer(shifted, hidden[:, :length], positions, past)
            out.append(hidden)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., rows]."""
        return self.lm_head(self.norm(hidden))

    def guesses(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> the best token of the target's vocabulary, int64 [...]."""
        best = self.logits(hidden).argmax(-1)
        return best if self.proposed is None else self.proposed.to(best.device)[best]

    def rows(self, tokens: Tensor) -> Tensor:
        """Return each token's row of the head, and -100 for a token that the draft cannot propose."""
        return tokens if self.row_of is None else self.row_of.to(tokens.device)[tokens]


def pad_right(rows: Sequence[Sequence[int]]) -> Tensor:
    """Token rows as one tensor [B, longest], filled with 0."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])

"""Stand-ins of AITER's attention: a sequence at a time, with the masked attention of the engine on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..aiter_rules import whole
from ..cpu.attention import BLOCK, masked_attention
from .operators import operator

_Reader = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]  # keys and values of rows from, to


def _sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from q [M, H, D] to k [L, G, D] and v [L, G, Dv]: output [M, H, Dv] and log-sum-exp [M, H], float32.

    causal: the last query sees all keys, each earlier one a key less.
    """
    queries, heads = q.shape[:2]
    length, groups = k.shape[:2]
    if not length:
        return q.new_zeros(queries, heads, v.shape[-1]).float(), torch.full((queries, heads), -torch.inf)
    position = torch.full((queries,), length - 1)
    if causal:
        position = position - queries + 1 + torch.arange(queries)
    keep = torch.arange(-(-length // BLOCK) * BLOCK).clamp(max=length - 1)
    keys = k[keep].float().transpose(0, 1)
    values = v[keep].float().transpose(0, 1)
    values = torch.cat([values, values.new_ones(*values.shape[:-1], 1)], -1)
    out = masked_attention(q.unsqueeze(0), keys, values, position.unsqueeze(0), scale)[0]
    scores = torch.einsum("mgrd,lgd->mgrl", q.float().view(queries, groups, heads // groups, -1) * scale, k.float())
    scores = scores.masked_fill(torch.arange(length) > position.view(-1, 1, 1, 1), -torch.inf)
    return out, scores.logsumexp(-1).view(queries, heads)


def _ragged(
    q: torch.Tensor,
    out: torch.Tensor,
    q_bounds: torch.Tensor,
    k_bounds: torch.Tensor,
    keys_and_values: _Reader,
    scale: float,
    causal: bool,
) -> torch.Tensor:
    """Fill `out` for each sequence between the bounds; return the log-sum-exp [H, T]."""
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf)
    starts, key_starts = q_bounds.tolist(), k_bounds.tolist()
    for sequence in range(min(len(starts), len(key_starts)) - 1):
        rows = slice(starts[sequence], starts[sequence + 1])
        if rows.stop > rows.start:
            keys, values = keys_and_values(key_starts[sequence], key_starts[sequence + 1])
            result, sums = _sequence(q[rows], keys, values, scale, causal)
            out[rows] = result.to(out.dtype)
            lse[:, rows] = sums.T
    out[starts[-1] :] = torch.nan  # a kernel leaves these rows as they are in memory
    return lse


def _paged(cache: torch.Tensor, value: torch.Tensor, pages: torch.Tensor) -> _Reader:
    """Return a reader of a cache with pages of one token: [slots, ..., G, D]."""
    k, v = (part.reshape(-1, part.shape[-2], part.shape[-1]) for part in (cache, value))
    pages = whole(pages)
    return lambda first, last: (k[pages[first:last].long()], v[pages[first:last].long()])


@operator("aiter.mla.mla_decode_fwd")
@operator("aiter.mla.mla_prefill_fwd")
def mla_fwd(
    q: torch.Tensor,
    kv_buffer: torch.Tensor,
    o: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> None:
    value = kv_buffer[..., : o.shape[-1]]
    _ragged(q, o, qo_indptr, kv_indptr, _paged(kv_buffer, value, kv_indices), sm_scale, causal=True)


@operator("aiter.flash_attn_varlen_func")
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    out = q.new_empty(*q.shape[:2], v.shape[-1]) if out is None else out
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    lse = _ragged(q, out, cu_seqlens_q, cu_seqlens_k, lambda a, b: (k[a:b], v[a:b]), scale, causal)
    return (out, lse) if return_lse else out


@operator("aiter.mha_batch_prefill_func")
def mha_batch_prefill_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_page_indices: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    out = q.new_empty(*q.shape[:2], v.shape[-1]) if out is None else out
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    _ragged(q, out, cu_seqlens_q, kv_indptr, _paged(k, v, kv_page_indices), scale, causal)
    return out


@operator("aiter.paged_attention_ragged")
def paged_attention_ragged(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scale: float,
    kv_indptr: torch.Tensor,
    kv_page_indices: torch.Tensor,
) -> None:
    one_each = torch.arange(len(query) + 1)
    _ragged(query, out, one_each, kv_indptr, _paged(key_cache, value_cache, kv_page_indices), scale, causal=True)

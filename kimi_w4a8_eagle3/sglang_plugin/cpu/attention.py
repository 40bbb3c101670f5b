"""Paged attention for SGLang's CPU engine in torch: `torch.ops.sgl_kernel.{decode,extend}_attention_cpu`.

Both serve MHA/GQA layers (the EAGLE3 draft) and absorbed MLA layers, whose key holds the 1-head latent and whose value
is a view of its first columns. A query's result depends, bit for bit, on itself and on the keys that it sees: sums run
in float32 over blocks of keys that begin at the sequence's first, in products whose order of summation is fixed
(`batch_invariant`), and what it does not see adds exact zeros.
"""

from __future__ import annotations

import torch

from .batch_invariant import padded

# Upper bound on the elements of one padded score block [requests, heads, queries, keys] (float32: 256 MB).
_MAX_SCORES = 64 * 1024 * 1024
# Keys in one sum of products: up to here BLAS adds them one after the other.
_BLOCK = 128
# Queries at once: those of a long prompt see few of its keys at first, and their scores stay near the processor.
_QUERIES = 128

_DECODE = (
    "decode_attention_cpu(Tensor query, Tensor(a!) k_cache, Tensor(b!) v_cache, float k_scale, float v_scale, "
    "Tensor(c!) output, Tensor? key, Tensor? value, Tensor loc, Tensor attn_logits, Tensor req_to_token, "
    "Tensor req_pool_indices, Tensor seq_lens, float sm_scale, float logit_cap, bool is_cross_attn, "
    "int sliding_window, Tensor? encoder_lens, Tensor? sinks) -> ()"
)
_EXTEND = (
    "extend_attention_cpu(Tensor q_extend, Tensor? k_extend, Tensor? v_extend, Tensor(a!) o_extend, Tensor k_buffer, "
    "Tensor v_buffer, float k_scale, float v_scale, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, "
    "Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend, float sm_scale, float logit_cap, "
    "bool is_cross_attn, int sliding_window, Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask, "
    "bool is_causal) -> ()"
)
_library: torch.library.Library | None = None


def register() -> None:
    """Define both operators in the `sgl_kernel` namespace."""
    global _library
    _library = torch.library.Library("sgl_kernel", "FRAGMENT")
    for schema, function in ((_DECODE, decode_attention_cpu), (_EXTEND, extend_attention_cpu)):
        _library.define(schema)
        _library.impl(schema.partition("(")[0], function, "CPU")


def decode_attention_cpu(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: float,
    v_scale: float,
    output: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    loc: torch.Tensor,
    attn_logits: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window: int,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    """Store this step's key and value, then attend: query [B, H, Dk] -> output [B, H, Dv]."""
    _require_plain(logit_cap, is_cross_attn, sliding_window, sinks, None)
    if key is not None and value is not None:
        k_cache[loc] = key.view(-1, *k_cache.shape[1:]).to(k_cache.dtype)
        # An MLA value is a view that begins where its key begins; an MHA pool may hold both in one allocation.
        if v_cache.data_ptr() != k_cache.data_ptr():
            v_cache[loc] = value.view(-1, *v_cache.shape[1:]).to(v_cache.dtype)
    lengths = seq_lens.long()
    if not len(lengths):
        return
    slots = _slots(req_to_token, req_pool_indices, lengths)
    out = _attend(query.unsqueeze(1), k_cache[slots], v_cache[slots], (lengths - 1).unsqueeze(1), sm_scale)
    output.copy_(out.squeeze(1))


def extend_attention_cpu(
    q_extend: torch.Tensor,
    k_extend: torch.Tensor | None,
    v_extend: torch.Tensor | None,
    o_extend: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    extend_start_loc: torch.Tensor,
    max_len_extend: int,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window: int,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
    tree_mask: torch.Tensor | None,
    is_causal: bool,
) -> None:
    """Attend from each request's new tokens to its whole sequence: q_extend [T, H, Dk] -> o_extend [T, H, Dv].

    The new keys are in the cache already, and are read from there as later requests read them.
    """
    _require_plain(logit_cap, is_cross_attn, sliding_window, sinks, tree_mask)
    if k_extend is not None and k_extend.shape[1:] != k_buffer.shape[1:]:
        raise RuntimeError("MHA prefill reached the CPU attention, whose cache holds latents: `absorbed` is not in use")
    lengths, new = seq_lens.long(), extend_seq_lens.long()
    first = torch.cumsum(new, 0) - new
    for rows in _buckets(new, lengths, q_extend.shape[1]):
        queries = int(new[rows].max())
        if queries == 0:
            continue
        step = torch.arange(queries)
        valid = step < new[rows].unsqueeze(1)
        token = torch.where(valid, first[rows].unsqueeze(1) + step, 0)
        slots = _slots(req_to_token, req_pool_indices[rows], lengths[rows])
        position = (lengths - new)[rows].unsqueeze(1) + step
        if not is_causal:
            position = (lengths[rows] - 1).unsqueeze(1).expand_as(position)
        k, v = k_buffer[slots], v_buffer[slots]
        for part in torch.arange(queries).split(_QUERIES):
            seen = (int(position[:, part].max()) // _BLOCK + 1) * _BLOCK
            at, real = token[:, part], valid[:, part]
            out = _attend(q_extend[at], k[:, :seen], v[:, :seen], position[:, part], sm_scale)
            o_extend[at[real]] = out[real].to(o_extend.dtype)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: torch.Tensor, scale: float) -> torch.Tensor:
    """Masked grouped-query attention: q [B, M, H, Dk], k [B, L, G, Dk], v [B, L, G, Dv] -> [B, M, H, Dv] float32.

    A query at `position` [B, M] sees the keys 0..position of its request. L is a multiple of _BLOCK.
    """
    batch, m, heads, dim = q.shape
    length, groups = k.shape[1:3]
    rows = m * heads // groups
    # One product per key head: its query heads share the keys.
    q = q.float().view(batch, m, groups, -1, dim).transpose(1, 2).reshape(batch * groups, rows, dim)
    k, v = (each.float().transpose(1, 2).reshape(batch * groups, length, -1) for each in (k, v))
    v = torch.nn.functional.pad(v, (0, 1), value=1.0)  # the last column adds up the weights
    last = position.repeat_interleave(rows // m, 1).repeat_interleave(groups, 0).unsqueeze(-1)
    scores = torch.baddbmm(q.new_empty(1, 1, 1), padded(q * scale), k.transpose(1, 2), beta=0)
    scores[:, :rows].masked_fill_(torch.arange(length) > last, float("-inf"))
    weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    out = weights.new_zeros(*weights.shape[:2], v.shape[-1])
    for block in range(0, length, _BLOCK):
        out = torch.baddbmm(out, weights[..., block : block + _BLOCK], v[:, block : block + _BLOCK])
    out = (out[..., :-1] / out[..., -1:])[:, :rows]
    return out.view(batch, groups, m, -1, v.shape[-1] - 1).transpose(1, 2).reshape(batch, m, heads, -1)


def _slots(req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """KV slots [B, L] of the requests, L a multiple of _BLOCK; beyond its length a request's first one again.

    Never another request's: a weight of zero does not hide a NaN.
    """
    step = torch.arange(-(-int(lengths.max()) // _BLOCK) * _BLOCK)
    position = torch.where(step < lengths.unsqueeze(1), step, 0)
    return req_to_token[req_pool_indices.long().unsqueeze(1), position].long()


def _buckets(new: torch.Tensor, lengths: torch.Tensor, heads: int) -> list[torch.Tensor]:
    """Split the batch into groups of similar size, so that padding stays small and a score block fits memory."""
    size = torch.ceil(torch.log2(new.clamp_min(1).double())) * 64 + torch.ceil(
        torch.log2(lengths.clamp_min(1).double())
    )
    groups: list[torch.Tensor] = []
    for value in torch.unique(size):
        rows = torch.nonzero(size == value).squeeze(1)
        per_request = heads * int(new[rows].max()) * int(lengths[rows].max())
        groups.extend(rows.split(max(1, _MAX_SCORES // max(1, per_request))))
    return groups


def _require_plain(
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window: int,
    sinks: torch.Tensor | None,
    tree_mask: torch.Tensor | None,
) -> None:
    """Refuse what this package's models do not use instead of computing something else."""
    unsupported = {
        "logit cap": logit_cap > 0,
        "cross attention": is_cross_attn,
        "sliding window": sliding_window > 0,
        "attention sinks": sinks is not None,
        "draft trees": tree_mask is not None,
    }
    names = [name for name, used in unsupported.items() if used]
    if names:
        raise NotImplementedError(f"The CPU reference attention does not support {', '.join(names)}")

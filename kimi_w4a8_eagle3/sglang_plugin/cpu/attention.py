"""Paged attention for SGLang's CPU engine in torch: `torch.ops.sgl_kernel.{decode,extend}_attention_cpu`.

Both serve MHA/GQA layers (the EAGLE3 draft, MLA prefill) and absorbed MLA layers, whose key holds the 1-head latent
and whose value is a view of its first columns. Sums run in float32.
"""

from __future__ import annotations

import torch

# Upper bound on the elements of one padded score block [requests, heads, queries, keys] (float32: 256 MB).
_MAX_SCORES = 64 * 1024 * 1024

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
    slots = _slots(req_to_token, req_pool_indices, int(lengths.max()) if len(lengths) else 0)
    out = _attend(query.unsqueeze(1), k_cache[slots], v_cache[slots], (lengths - 1).unsqueeze(1), lengths, sm_scale)
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

    The new keys are in the cache already, except for MLA prefill, which comes as plain MHA over k and v while the
    cache holds the latent; it is used only without a cached prefix.
    """
    _require_plain(logit_cap, is_cross_attn, sliding_window, sinks, tree_mask)
    lengths, new = seq_lens.long(), extend_seq_lens.long()
    first = torch.cumsum(new, 0) - new
    from_cache = k_extend is None or k_extend.shape[1:] == k_buffer.shape[1:]
    if not from_cache and bool((lengths != new).any()):
        raise RuntimeError(
            "MHA prefill over a cached MLA prefix reached the CPU attention: keys of the prefix are latent"
        )
    for rows in _buckets(new, lengths, q_extend.shape[1]):
        queries, keys = int(new[rows].max()), int(lengths[rows].max())
        if queries == 0:
            continue
        step = torch.arange(queries)
        valid = step < new[rows].unsqueeze(1)
        token = torch.where(valid, first[rows].unsqueeze(1) + step, 0)
        if from_cache:
            slots = _slots(req_to_token, req_pool_indices[rows], keys)
            k, v = k_buffer[slots], v_buffer[slots]
        else:
            assert k_extend is not None and v_extend is not None
            k, v = k_extend[token], v_extend.view(len(v_extend), -1, o_extend.shape[-1])[token]
        position = (lengths - new)[rows].unsqueeze(1) + step
        if not is_causal:
            position = (lengths[rows] - 1).unsqueeze(1).expand_as(position)
        out = _attend(q_extend[token], k, v, position, lengths[rows], sm_scale)
        o_extend[token[valid]] = out[valid].to(o_extend.dtype)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: torch.Tensor, lengths: torch.Tensor, scale: float
) -> torch.Tensor:
    """Masked grouped-query attention: q [B, M, H, Dk], k [B, L, G, Dk], v [B, L, G, Dv] -> [B, M, H, Dv] float32.

    A query at `position` [B, M] sees the keys 0..position of its request, never beyond `lengths` [B].
    """
    batch, m, heads, dim = q.shape
    length, groups = k.shape[1:3]
    per_group = heads // groups
    # One matmul per key head: its query heads share the keys.
    q = (
        q.float()
        .view(batch, m, groups, per_group, dim)
        .permute(0, 2, 3, 1, 4)
        .reshape(batch, groups, per_group * m, dim)
    )
    scores = torch.matmul(q * scale, k.float().permute(0, 2, 3, 1)).view(batch, groups, per_group, m, length)
    index = torch.arange(length)
    visible = (index <= position.unsqueeze(-1)) & (index < lengths.view(-1, 1, 1))
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    out = torch.matmul(weights.view(batch, groups, per_group * m, length), v.float().permute(0, 2, 1, 3))
    return out.view(batch, groups, per_group, m, -1).permute(0, 3, 1, 2, 4).reshape(batch, m, heads, -1)


def _slots(req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, width: int) -> torch.Tensor:
    """KV slots [B, width] of the requests; entries beyond a request's length point anywhere valid."""
    return req_to_token[req_pool_indices.long(), :width].long()


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

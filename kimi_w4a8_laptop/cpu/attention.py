"""Paged attention for SGLang's CPU engine in torch: `torch.ops.sgl_kernel.{decode,extend}_attention_cpu`.

Both serve MHA/GQA layers (the EAGLE3 draft) and absorbed MLA layers, whose key holds the 1-head latent and whose value
is a view of its first columns. A query's result depends, bit for bit, only on the query and the keys that it sees. Sums
run in float32 over blocks of keys that begin at the sequence's first key, in products whose order of summation is fixed
(`batch_invariant`). Masked keys add exact zeros.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch

from ..contract_check import takes
from .batch_invariant import batched_rows, padded

# Upper bound on the elements of a block of scores [requests, heads, queries, keys] with more than one request
# (float32: 2 MB).
_MAX_SCORES = 512 * 1024
# Keys per product: up to this number BLAS adds them in sequence.
BLOCK = 128
# Queries per block: the first queries of a long prompt see few keys, and small blocks of scores stay in the cache.
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


@takes("sgl_kernel.decode_attention_cpu")
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
    _require_plain(logit_cap, is_cross_attn, sliding_window, sinks)
    if key is not None and value is not None:
        k_cache[loc] = key.to(k_cache.dtype)
        # An MLA value is a view that begins where its key begins; an MHA pool may hold both in one allocation.
        if v_cache.data_ptr() != k_cache.data_ptr():
            v_cache[loc] = value.to(v_cache.dtype)
    new = [1] * len(seq_lens)
    _attend(query, k_cache, v_cache, output, req_to_token, req_pool_indices, seq_lens.tolist(), new, sm_scale)


@takes("sgl_kernel.extend_attention_cpu")
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
    _require_plain(logit_cap, is_cross_attn, sliding_window, sinks, tree_mask, is_causal)
    if k_extend is not None and k_extend.shape[1:] != k_buffer.shape[1:]:
        raise RuntimeError("MHA prefill reached the CPU attention, whose cache holds latents: `absorbed` is not in use")
    lengths, new = seq_lens.tolist(), extend_seq_lens.tolist()
    _attend(q_extend, k_buffer, v_buffer, o_extend, req_to_token, req_pool_indices, lengths, new, sm_scale)


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    output: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    lengths: list[int],
    new: list[int],
    scale: float,
) -> None:
    """Attend from the last `new` tokens of each sequence, packed: q [T, H, Dk] -> output [T, H, Dv]."""
    for part in _plan(req_to_token, req_pool_indices, lengths, new, q.shape[1]):
        k = _gather(k_cache, part.slots)
        # An MLA value is a view that begins where its key begins.
        v = k[..., : v_cache.shape[-1]] if v_cache.data_ptr() == k_cache.data_ptr() else _gather(v_cache, part.slots)
        v = torch.nn.functional.pad(v, (0, 1), value=1.0)  # the last column sums the weights
        for token, position, keys in part.queries:
            rows = q.index_select(0, token).view(*position.shape, *q.shape[1:])
            out = masked_attention(rows, k[:, :keys], v[:, :keys], position, scale)
            output[token] = out.flatten(0, 1).to(output.dtype)


class _Part(NamedTuple):
    """Requests that are computed together."""

    slots: torch.Tensor  # [B, L], L a multiple of BLOCK
    queries: list[tuple[torch.Tensor, torch.Tensor, int]]  # rows of q [B*M], positions [B, M], keys that they see


def _plan(table: torch.Tensor, pool: torch.Tensor, lengths: list[int], new: list[int], heads: int) -> list[_Part]:
    """Group a batch into parts and find the slots of their keys, once for all layers of a forward pass."""
    global _planned
    if table.is_inference():  # a one-layer draft; torch keeps no version of inference tensors, so no cache is safe
        return _parts(table, pool, lengths, new, heads)
    key = table._version, heads, pool.tolist(), lengths, new
    if _planned is None or _planned[0] is not table or _planned[1] != key:
        _planned = table, key, _parts(table, pool, lengths, new, heads)
    return _planned[2]


_planned: tuple[torch.Tensor, tuple[int, int, list[int], list[int], list[int]], list[_Part]] | None = None


def _parts(table: torch.Tensor, pool: torch.Tensor, lengths: list[int], new: list[int], heads: int) -> list[_Part]:
    first = list(accumulate(new, initial=0))
    parts = []
    for bucket in _buckets(new, lengths, heads):
        rows, count = torch.tensor(bucket), new[bucket[0]]
        start = torch.tensor([first[row] for row in bucket]).unsqueeze(1)
        end = torch.tensor([lengths[row] for row in bucket]).unsqueeze(1)
        most = max(lengths[row] for row in bucket)
        # Beyond its length a request repeats its own last key, never another's: a zero weight does not hide a NaN.
        seen = torch.minimum(torch.arange(_blocks(most) * BLOCK), end - 1)
        part = _Part(table[:, :most].index_select(0, pool.index_select(0, rows)).gather(1, seen), [])
        for at in range(0, count, _QUERIES):
            step = torch.arange(at, min(at + _QUERIES, count))
            keys = _blocks(most - count + at + len(step)) * BLOCK
            part.queries.append(((start + step).flatten(), end - count + step, keys))
        parts.append(part)
    return parts


def masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: torch.Tensor, scale: float
) -> torch.Tensor:
    """Masked grouped-query attention: q [B, M, H, Dk], k [B*G, L, Dk], v [B*G, L, Dv + 1] -> [B, M, H, Dv] float32.

    A query at `position` [B, M] sees the keys 0..position of its request. L is a multiple of BLOCK.
    """
    batch, m, heads, dim = q.shape
    length, groups = k.shape[1], len(k) // batch
    rows = m * heads // groups
    # One product per key head: its query heads share the keys.
    q = q.float().view(batch, m, groups, -1, dim).transpose(1, 2).reshape(batch * groups, rows, dim)
    q = padded(q * scale, batched_rows(dim, transposed=True))
    scores = torch.baddbmm(q.new_empty(1, 1, 1), q, k.transpose(1, 2), beta=0)[:, :rows]
    unseen = torch.arange(length) > position.view(batch, 1, m, 1, 1)
    scores.view(batch, groups, m, -1, length).masked_fill_(unseen, float("-inf"))
    weights = padded(scores.sub_(scores.amax(-1, keepdim=True)).exp_(), batched_rows(BLOCK, transposed=False))
    out = weights.new_zeros(*weights.shape[:2], v.shape[-1])
    for block in range(0, length, BLOCK):
        out.baddbmm_(weights[..., block : block + BLOCK], v[:, block : block + BLOCK])
    out = (out[..., :-1] / out[..., -1:])[:, :rows]
    return out.view(batch, groups, m, -1, v.shape[-1] - 1).transpose(1, 2).reshape(batch, m, heads, -1)


def _gather(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Gather rows `slots` [B, L] of a cache [S, G, D] as float32 [B*G, L, D]; indexing takes six times as long."""
    groups, dim = cache.shape[1:]
    if groups > 1:
        slots = slots.unsqueeze(1) * groups + torch.arange(groups).unsqueeze(1)
    return cache.view(-1, dim).index_select(0, slots.flatten()).float().view(-1, slots.shape[-1], dim)


def _blocks(keys: int) -> int:
    return -(-keys // BLOCK)


def _buckets(new: list[int], lengths: list[int], heads: int) -> list[list[int]]:
    """Split the batch into rows with equally many new tokens and similar length, whose scores stay in the cache."""
    groups: dict[tuple[int, int], list[int]] = {}
    for row, (count, length) in enumerate(zip(new, lengths, strict=True)):
        if count:
            groups.setdefault((count, (_blocks(length) - 1).bit_length()), []).append(row)
    buckets: list[list[int]] = []
    for (count, _), rows in groups.items():
        longest = max(lengths[row] for row in rows)
        size = max(1, _MAX_SCORES // (heads * min(count, _QUERIES) * longest))
        buckets.extend(rows[at : at + size] for at in range(0, len(rows), size))
    return buckets


def _require_plain(
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window: int,
    sinks: torch.Tensor | None,
    tree_mask: torch.Tensor | None = None,
    is_causal: bool = True,
) -> None:
    """Raise NotImplementedError for options that this package's models do not use."""
    unsupported = {
        "logit cap": logit_cap > 0,
        "cross attention": is_cross_attn,
        "sliding window": sliding_window > 0,
        "attention sinks": sinks is not None,
        "draft trees": tree_mask is not None,
        "an encoder": not is_causal,
    }
    names = [name for name, used in unsupported.items() if used]
    if names:
        raise NotImplementedError(f"The CPU reference attention does not support {', '.join(names)}")

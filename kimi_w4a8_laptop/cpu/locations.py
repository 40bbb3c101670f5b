"""KV-cache bookkeeping operators of SGLang's speculative worker, in torch, vectorised over requests.

Names and argument order are those SGLang calls on its CPU engine. `req_to_token` is int32 [pool, max_len] and maps
(request slot, position) to a KV slot; locations are int64 and packed request after request.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from ..contract_check import takes

OPERATORS = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
)


def _ragged(start: torch.Tensor, end: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Flatten the ranges [start[b], end[b]) to (row [total], position [total])."""
    start, end = start.long(), end.long()
    lengths = end - start
    rows = torch.repeat_interleave(torch.arange(len(start)), lengths)
    first = torch.cumsum(lengths, 0) - lengths
    return rows, torch.arange(len(rows)) - first[rows] + start[rows]


@takes("sgl_kernel.assign_extend_cache_locs_cpu")
def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Read the KV slots of every request's positions [start, end) into `out_cache_loc`, packed."""
    rows, positions = _ragged(start_offset, end_offset)
    slots = req_to_token[req_pool_indices.long()[rows], positions]
    out_cache_loc[: len(rows)] = slots.long()


@takes("sgl_kernel.assign_req_to_token_pool_cpu")
def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write packed KV slots to every request's positions [start, end): the inverse of the read above."""
    rows, positions = _ragged(start_offset, end_offset)
    req_to_token[req_pool_indices.long()[rows], positions] = out_cache_loc[: len(rows)].int()


@takes("sgl_kernel.assign_draft_cache_locs_contiguous_cpu")
def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the `topk * num_steps` slots that follow each request's committed tokens."""
    positions = seq_lens.long().unsqueeze(1) + torch.arange(topk * num_steps)
    slots = req_to_token[req_pool_indices.long().unsqueeze(1), positions]
    out_cache_loc[: slots.numel()] = slots.reshape(-1).long()


@takes("sgl_kernel.build_draft_decode_metadata_cpu")
def build_draft_decode_metadata_cpu(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> torch.Tensor:
    """Return the token table of the draft's decode steps: one row per chain, with its prefix and draft slots."""
    require_chain(topk)
    width = int(seq_lens.max()) + num_steps if len(seq_lens) else 0
    return req_to_token[:, : min(width, pool_len)].index_select(0, req_pool_indices)


@takes("sgl_kernel.fill_bonus_tokens_cpu")
def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int
) -> None:
    """Take each request's last committed token (`accept_lens` counts the bonus token)."""
    rows = torch.arange(len(accept_lens))
    bonus_tokens[: len(rows)] = accept_tokens.view(-1)[rows * accept_stride + accept_lens - 1]


@takes("sgl_kernel.fill_accept_out_cache_loc_cpu")
def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Pack the KV slots of the accepted tokens (`accept_index` is -1 where a token was rejected)."""
    accepted = accept_index.view(-1)
    slots = out_cache_loc[accepted[accepted != -1].long()]
    accept_out_cache_loc[: len(slots)] = slots


@takes("sgl_kernel.copy_all_layer_kv_cache_cpu")
def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Move KV rows in every layer's buffer, given as raw addresses with a row stride in bytes."""
    if not len(tgt_loc):
        return
    target, source = tgt_loc.numpy(), src_loc.numpy()
    rows = int(max(target.max(), source.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        buffer = (ctypes.c_uint8 * (rows * stride)).from_address(address)
        view = np.frombuffer(buffer, dtype=np.uint8).reshape(rows, stride)
        view[target] = view[source]


def require_chain(topk: int) -> None:
    """Raise NotImplementedError for draft trees: these operators only know chains (topk 1), as every recipe uses."""
    if topk != 1:
        raise NotImplementedError(
            f"The CPU reference platform supports --speculative-eagle-topk 1 only, got {topk}; "
            "install a compiled sgl_kernel for draft trees."
        )

"""EAGLE's draft chain and its greedy verification in torch, vectorised over requests (topk 1).

With topk 1 the draft is a chain of `n` tokens: token 0 is the last committed one and token i follows token i-1. The
index arrays that SGLang passes for trees are filled accordingly, so that its worker needs no special case.
"""

from __future__ import annotations

import torch

from ..contract_check import takes
from .locations import require_chain

OPERATORS = ("build_tree_kernel_efficient_cpu", "verify_tree_greedy_cpu")


@takes("sgl_kernel.build_tree_kernel_efficient")
def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Fill positions [B*n], the three link arrays [B, n] and the causal QLEN_ONLY mask [B*n*n] of a chain."""
    require_chain(topk)
    batch, n = len(verified_seq_len), draft_token_num
    step = torch.arange(n)
    positions.view(batch, n).copy_(verified_seq_len.unsqueeze(1) + step)
    retrive_index.copy_(torch.arange(batch).unsqueeze(1) * n + step)
    retrive_next_token.copy_(torch.where(step + 1 < n, step + 1, -1).expand(batch, n))
    retrive_next_sibling.fill_(-1)
    causal = step.unsqueeze(0) <= step.unsqueeze(1)
    tree_mask[: batch * n * n].view(batch, n, n).copy_(causal.expand(batch, n, n))


@takes("sgl_kernel.verify_tree_greedy")
def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Accept the longest prefix of each chain that the target's argmax agrees with, then commit one bonus token.

    candidates, target_predict: [B, n]; accept_index: [B, steps + 1], -1 where nothing was accepted; predicts: flat
    [B*n], the target's token at every committed index; accept_token_num: [B], accepted draft tokens without the bonus.
    """
    width = accept_index.shape[1]
    agrees = candidates[:, 1:width] == target_predict[:, : width - 1]
    accepted = torch.cumprod(agrees.int(), dim=1).sum(dim=1)
    accept_token_num.copy_(accepted)

    committed = torch.arange(width) <= accepted.unsqueeze(1)
    index = retrive_index[:, :width]
    accept_index.copy_(torch.where(committed, index, accept_index))
    predicts[index[committed]] = target_predict[:, :width][committed].int()

"""The contracts of the compiled operators on the path of the recipes, by the operators' names.

Read in SGLang 0.5.20 and AITER e4048607. A rule is as strict as the strictest build of the operator, and covers what
its code reads without a check. `contract_check.py` checks calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tensor:
    """A tensor argument.

    shape: dimensions separated by spaces. A name has one value in the whole call, `a*b` is a product of names, a number
    is itself, and `_` is any size. None allows any rank.
    """

    dtypes: torch.dtype | tuple[torch.dtype, ...]
    shape: str | None = None
    contiguous: bool = True
    optional: bool = False


@dataclass(frozen=True)
class Value:
    """An argument that is no tensor."""

    kinds: type | tuple[type, ...]
    optional: bool = False


@dataclass(frozen=True)
class Contract:
    """Arguments of one operator in their order, and the source that they were read from."""

    arguments: Mapping[str, Tensor | Value]
    source: str


_INT, _LONG = torch.int32, torch.int64

CONTRACTS: Mapping[str, Contract] = {
    # The GPU builds check types and shapes, and the CPU build checks the memory of the outputs as well.
    "verify_tree_greedy": Contract(
        {
            "predicts": Tensor(_INT, "_"),
            "accept_index": Tensor(_INT, "batch steps"),
            "accept_token_num": Tensor(_INT, "batch"),
            "candidates": Tensor(_LONG, "batch drafts"),
            "retrive_index": Tensor(_LONG, "batch drafts"),
            "retrive_next_token": Tensor(_LONG, "batch drafts"),
            "retrive_next_sibling": Tensor(_LONG, "batch drafts"),
            "target_predict": Tensor(_LONG, "batch drafts"),
        },
        "sgl-kernel/csrc/speculative/eagle_utils.cu and csrc/cpu/speculative_decoding.cpp",
    ),
}

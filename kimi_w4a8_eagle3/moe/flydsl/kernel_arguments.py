"""Arguments of the kernels in launch order.

The host fills in tensors and numbers. In a kernel the same fields are FlyDSL's fx.Int64 (addresses) and fx.Int32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

Address: TypeAlias = Any
Number: TypeAlias = Any


@dataclass
class RouteArguments:
    x: Address  # bfloat16 [T, hidden]
    ids: Address  # int32 [T, top_k]
    a8: Address  # int8 [T, hidden]
    info: Address  # of the tokens: float32 scale, int32 low_sum
    order: Address  # int32 [T * top_k]
    table: Address  # int32 [B, 4]
    tokens: Number
    blocks: Number  # B


@dataclass
class _RoutedArguments:
    """The rows and weights of both stages, and the tables that sort the rows, in blocks of tile_m.

    Stage 2's scales are `layout.slot_scales`.
    """

    rows: Address  # stage 1: token rows int8 [T, hidden]; stage 2: slot rows float32 [T * top_k, inter]
    row_info: Address  # for each of the rows: float32 scale (stage 2: times the router weight), int32 low_sum
    weights: Address  # flydsl_layout [E, channels/16, k/128, 64, 16]
    w_scale: Address  # float32 [E, channels]
    order: Address  # int32 [T * top_k]: slots by expert
    # int32 [B, 4] for the B blocks that are launched: expert, place of the first row in `order`, number of rows (0:
    # unused block), number of used blocks
    blocks: Address


@dataclass
class Stage1Arguments(_RoutedArguments):
    out: Address  # float32 [T * top_k, inter]
    tokens: Number


@dataclass
class Stage2Arguments(_RoutedArguments):
    """A kernel that quantizes writes row_info, and in prefill also `kept`. Other kernels read both."""

    router: Address  # float32 [T, top_k]
    out: Address  # float16 [T * top_k, columns]
    kept: Address  # slot rows int8 [T * top_k, inter]
    tokens: Number
    column: Number = 0  # first of the channels that this launch computes
    columns: Number = 0


@dataclass
class ByTokenArguments:
    rows: Address  # slot rows float32 [T * top_k, inter]
    weights: Address  # flydsl_layout
    scales: Address  # `layout.slot_scales`
    router: Address  # float32 [T, top_k]
    ids: Address  # int32 [T, top_k]
    out: Address  # bfloat16 [T, hidden]


@dataclass
class ReduceArguments:
    slots: Address  # [T * top_k, columns]
    info: Address
    ids: Address  # int32 [T, top_k]
    out: Address  # bfloat16 [T, hidden]
    tokens: Number
    column: Number = 0  # first of the columns of this launch
    columns: Number = 0


@dataclass
class W4A16Arguments:
    rows: Address  # bfloat16 [T, hidden] (stage 1) or [T * top_k, inter] (stage 2)
    weights: Address  # flydsl_layout
    w_scale: Address  # float32 [E, channels of the weights], of stage 2 `layout.slot_scales`
    order: Address
    blocks: Address
    out: Address  # bfloat16 [T * top_k, columns]
    tokens: Number


Routed: TypeAlias = _RoutedArguments | W4A16Arguments  # what names the tables of the sorted rows

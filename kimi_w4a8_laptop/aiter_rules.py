"""What AITER's kernels for gfx942 need of sizes, and of the numbers in page tables and bounds; see `contracts.Rule`.

Read in AITER e4048607: hsa/gfx942/mla/mla_asm.csv and csrc/py_itfs_cu/asm_mla.cu (which kernel, its grid and strides),
csrc/cpp_itfs/pa/pa_ragged.py and pa_kernels.cuh (the workspace), csrc/py_itfs_ck/mha_*.cu (sizes of heads).
"""

from __future__ import annotations

import torch

from .contracts import Given, Rule, within

# BF16 rows of mla_asm.csv for gfx942: heads, persistent, queries of a request (0: any).
_DECODE = {
    *((heads, False, 0) for heads in (32, 64, 128)),
    *((16, False, queries) for queries in (1, 4, 8)),
    *((8, False, 1), (8, True, 2), (16, True, 4)),
}
_PREFILL = (16, 128)
_PARTITION = 256
PADDING = 7  # rows at most, to a multiple of eight ranks, in SGLang's input-scattered attention


def _has_kernel(given: Given) -> bool:
    """Return True if `mla_decode_stage1_asm_fwd` finds a kernel after `mla_decode_fwd` has folded the heads."""
    heads, queries = given["q"].shape[1], given["max_seqlen_q"]
    persistent = given.get("work_meta_data") is not None
    if persistent and heads % 16 == 0 and 32 <= heads <= 128:
        heads = 16
    if heads == 16:
        steps = (4,) if persistent else (1, 4, 8)
        queries = next((step for step in steps if queries <= step), steps[-1])
    elif heads == 64 and queries == 1:
        return False  # asm_mla.cu asks for a kernel of one query, and the table's takes any number
    elif heads > 16:
        queries = 0
    return (heads, persistent, queries) in _DECODE


def _numbers(bounds: torch.Tensor) -> list[int]:
    return [int(number) for number in bounds.tolist()]


def _longest(bounds: torch.Tensor) -> int:
    return int(bounds.diff().max()) if len(bounds) > 1 else 0


def _same_batch(argument: str, bounds: str) -> Rule:
    return Rule(argument, f"one for each sequence of {bounds}", lambda g: len(g[argument]) >= len(g[bounds]) - 1)


def rising(bounds: str) -> Rule:
    return Rule(
        bounds,
        "0, and then no number below the one before",
        lambda g: int(g[bounds][0]) == 0 and bool((g[bounds].diff() >= 0).all()),
    )


def rows(bounds: str, query: str, padding: int = 0) -> Rule:
    """The bounds cover the query but for its padding to a multiple of the ranks, which a stand-in fills with NaN."""
    expected = f"the last bound at the end of {query}" + (f", or at most {padding} rows before" if padding else "")
    return Rule(bounds, expected, lambda g: 0 <= len(g[query]) - _numbers(g[bounds])[-1] <= padding)


def longest(size: str, bounds: str) -> Rule:
    return Rule(size, f"at least the longest sequence of {bounds}", lambda g: g[size] >= _longest(g[bounds]))


def queries(bounds: str) -> tuple[Rule, ...]:
    """The bounds of prefilled queries `q`."""
    return rising(bounds), rows(bounds, "q", PADDING), longest("max_seqlen_q", bounds)


def whole(table: torch.Tensor) -> torch.Tensor:
    """Return a table up to the end of its memory: a kernel gets its address alone, and a graph keeps it."""
    return table.as_strided((table.untyped_storage().nbytes() // table.itemsize - table.storage_offset(),), (1,))


def pages(table: str, bounds: str, cache: str) -> tuple[Rule, ...]:
    """A page table reaches to its last bound, and names pages that the cache has up to there."""
    return (
        rising(bounds),
        Rule(
            table, f"as many as the last bound of {bounds}", lambda g: len(whole(g[table])) >= _numbers(g[bounds])[-1]
        ),
        Rule(table, f"pages of {cache}", lambda g: within(whole(g[table])[: _numbers(g[bounds])[-1]], len(g[cache]))),
    )


def _uniform(given: Given) -> bool:
    numbers, queries = _numbers(given["qo_indptr"]), given["max_seqlen_q"]
    return numbers == [queries * i for i in range(len(numbers))]


def _workspace(given: Given) -> bool:
    sequences, heads, head = given["query"].shape
    parts = sequences * heads * given["max_num_partitions"]
    return bool(given["workspace_buffer"].numel() >= parts * (2 * 4 + head * given["query"].element_size()))


def head(*arguments: str) -> tuple[Rule, ...]:
    def rule(argument: str) -> Rule:
        expected = "heads of at most 256, a multiple of 8"
        return Rule(argument, expected, lambda g: g[argument].shape[-1] <= 256 and g[argument].shape[-1] % 8 == 0)

    grouped = Rule("k", "heads that divide those of q", lambda g: g["q"].shape[1] % g["k"].shape[-2] == 0)
    return *map(rule, arguments), grouped


def same_strides(argument: str, other: str, *dimensions: int) -> Rule:
    return Rule(
        argument,
        f"the strides of {other}",
        lambda g: all(g[argument].stride(d) == g[other].stride(d) for d in dimensions or range(g[other].dim())),
    )


DECODE_SIZES = (
    Rule("q", "a kernel for these heads, types and queries in hsa/gfx942/mla/mla_asm.csv", _has_kernel),
    _same_batch("kv_last_page_lens", "qo_indptr"),
    Rule("num_kv_splits", "at least 1", lambda g: g["num_kv_splits"] > 0),
    Rule("o", "heads no wider than those of kv_buffer", lambda g: g["o"].shape[-1] <= g["kv_buffer"].shape[-1]),
)
DECODE_CONTENTS = (
    Rule("max_seqlen_q", "the queries of each request: it sets grid, strides and kernel", _uniform),
    rows("qo_indptr", "q"),
    *pages("kv_indices", "kv_indptr", "kv_buffer"),
)
PREFILL_SIZES = (
    Rule("q", "16 or 128 heads", lambda g: g["q"].shape[1] in _PREFILL),
    _same_batch("kv_last_page_lens", "qo_indptr"),
)
PREFILL_CONTENTS = (
    *queries("qo_indptr"),
    *pages("kv_indices", "kv_indptr", "kv_buffer"),
)
RAGGED_CONTENTS = (
    *queries("cu_seqlens_q"),
    rising("cu_seqlens_k"),
    Rule("cu_seqlens_k", "the last bound within k", lambda g: _numbers(g["cu_seqlens_k"])[-1] <= len(g["k"])),
    longest("max_seqlen_k", "cu_seqlens_k"),
)
BATCH_PREFILL_CONTENTS = (
    *queries("cu_seqlens_q"),
    *pages("kv_page_indices", "kv_indptr", "k"),
)  # max_seqlen_k only bounds a window, which no stand-in computes; SGLang's draft passes the number of its queries
# The kernel gets the strides of the keys alone.
PAGED_SIZES = (
    Rule("kv_indptr", "a bound more than queries", lambda g: len(g["kv_indptr"]) == len(g["query"]) + 1),
    Rule("kv_last_page_lens", "one for each query", lambda g: len(g["kv_last_page_lens"]) >= len(g["query"])),
    Rule("workspace_buffer", "two floats and a head of each partition of each query and head", _workspace),
    same_strides("value_cache", "key_cache"),
)
PAGED_CONTENTS = (
    *pages("kv_page_indices", "kv_indptr", "key_cache"),
    Rule(
        "max_num_partitions",
        "as many as the longest sequence has",
        lambda g: g["max_num_partitions"] * (g.get("partition_size") or _PARTITION) >= max(_longest(g["kv_indptr"]), 1),
    ),
)

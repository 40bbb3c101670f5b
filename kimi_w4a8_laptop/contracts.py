"""The contracts of the compiled operators on the path of the recipes, by module and name of the operator.

Read in SGLang 0.5.20 and AITER e4048607: from the C++ that checks and reads the arguments, and from SGLang's call where
the C++ of that release was not at hand. A rule is as strict as the strictest build of the operator, and covers what the
code reads without a check. `contract_check.py` checks calls, `aiter_contracts.py` has AITER's functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, Literal, NamedTuple

import torch


class Tensor(NamedTuple):
    """A tensor argument.

    dtypes: one, several, or the name of another tensor argument, whose dtype this one has. shape: dimensions separated
    by spaces. A name has one value in the whole call, `a*b` is a product of names and numbers, a number is itself, and
    `_` is any size. None allows any rank. layout: "rows" asks for a contiguous last dimension only.
    """

    dtypes: torch.dtype | tuple[torch.dtype, ...] | str
    shape: str | None = None
    layout: Literal["contiguous", "rows", "any"] = "contiguous"
    optional: bool = False


class Value(NamedTuple):
    """An argument that is no tensor."""

    kinds: type | tuple[type, ...]
    optional: bool = False


Arguments = dict[str, Tensor | Value]
Given = Mapping[str, Any]


class Rule(NamedTuple):
    """What an operator needs of several arguments. argument: the one that is named where it does not hold."""

    argument: str
    expected: str
    holds: Callable[[Given], bool]


def within(numbers: torch.Tensor, size: int) -> bool:
    """Return True if all numbers are indices of `size` elements."""
    return not numbers.numel() or (int(numbers.min()) >= 0 and int(numbers.max()) < size)


class Contract(NamedTuple):
    """Arguments of one operator in their order, and the source that they were read from.

    writes: arguments whose memory it writes. sizes: rules about shapes, strides and numbers, checked at a call.
    contents: rules about numbers in tensors, checked on the host's memory at a launch and at each replay of it.
    """

    arguments: Arguments
    source: str
    writes: tuple[str, ...] = ()
    sizes: tuple[Rule, ...] = ()
    contents: tuple[Rule, ...] = ()


_INT, _LONG, _FLOAT = torch.int32, torch.int64, torch.float32
_INDEX, _HALF = (_INT, _LONG), (torch.bfloat16, torch.float16)
# The CPU build reads e4m3fn and e5m2. Our stand-in emulates gfx942, whose FP8 is e4m3fnuz.
_CACHE = (*_HALF, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz)
_NUMBER = Value((int, float))
_INTEGER = Value(int)
_CPU = "sgl-kernel/csrc/cpu"
_TABLE: Arguments = {"req_pool_indices": Tensor(_INDEX, "batch"), "req_to_token": Tensor(_INT, "requests context")}
_RANGES: Arguments = {
    **_TABLE,
    "start_offset": Tensor(_INDEX, "batch"),
    "end_offset": Tensor("start_offset", "batch"),
    "out_cache_loc": Tensor(_LONG, "_"),
    "pool_len": _INTEGER,
}
# Later releases compile the kernel for a number of splits.
_SPLIT: Arguments = {"num_split": _INTEGER} if version("sglang") == "0.5.20" else {}  # gone in 0.5.23
_LINK = Tensor(_LONG, "batch drafts")
_ATTENTION: Arguments = {
    **dict.fromkeys(("sm_scale", "logit_cap"), _NUMBER),
    "is_cross_attn": Value(bool),
    "sliding_window": _INTEGER,
    "encoder_lens": Tensor(_LONG, "batch", optional=True),
    "sinks": Tensor((*_HALF, _FLOAT), "heads", optional=True),
}

# Missing on purpose: EAGLE's fast_topk is torch code of SGLang. AITER's fused_qk_rope_cat_and_cache_mla runs on gfx95
# alone, and its unified_attention needs a sliding window or a paged draft.
SGL_KERNEL: dict[str, Contract] = {
    # The GPU builds check types and shapes, and the CPU build checks the memory of the outputs as well.
    "sgl_kernel.verify_tree_greedy": Contract(
        {
            "predicts": Tensor(_INT, "_"),
            "accept_index": Tensor(_INT, "batch steps"),
            "accept_token_num": Tensor(_INT, "batch"),
            "candidates": _LINK,
            "retrive_index": _LINK,
            "retrive_next_token": _LINK,
            "retrive_next_sibling": _LINK,
            "target_predict": _LINK,
        },
        f"sgl-kernel/csrc/speculative/eagle_utils.cu and {_CPU}/spec.cpp",
        ("predicts", "accept_index", "accept_token_num"),
        (Rule("predicts", "a token for each draft", lambda g: len(g["predicts"]) >= g["candidates"].numel()),),
        (
            Rule("retrive_index", "places of predicts", lambda g: within(g["retrive_index"], len(g["predicts"]))),
            Rule("accept_index", "-1, which the kernel leaves behind", lambda g: bool((g["accept_index"] == -1).all())),
        ),
    ),
    # The GPU builds check nothing and read these types; drafts of topk 1 need no parents.
    "sgl_kernel.build_tree_kernel_efficient": Contract(
        {
            **dict.fromkeys(("parent_list", "selected_index"), Tensor(_LONG, "batch _")),
            "verified_seq_len": Tensor(_LONG, "batch"),
            "tree_mask": Tensor(torch.bool, "_"),
            "positions": Tensor(_LONG, "_"),
            **dict.fromkeys(("retrive_index", "retrive_next_token", "retrive_next_sibling"), _LINK),
            **dict.fromkeys(("topk", "depth", "draft_token_num", "tree_mask_mode"), _INTEGER),
        },
        f"sgl-kernel/csrc/speculative/eagle_utils.cu and {_CPU}/spec.cpp",
        ("tree_mask", "positions", "retrive_index", "retrive_next_token", "retrive_next_sibling"),
        (
            Rule("draft_token_num", "the drafts of a request", lambda g: g["draft_token_num"] == _drafts(g)),
            Rule("positions", "a position for each draft", lambda g: len(g["positions"]) >= g["retrive_index"].numel()),
            Rule("tree_mask", "room for its mode", lambda g: g["tree_mask"].nbytes >= _mask_bytes(g)),
        ),
    ),
    "sgl_kernel.assign_extend_cache_locs_cpu": Contract(_RANGES, f"{_CPU}/spec.cpp"),
    "sgl_kernel.assign_req_to_token_pool_cpu": Contract(_RANGES, f"{_CPU}/spec.cpp"),
    "sgl_kernel.assign_draft_cache_locs_contiguous_cpu": Contract(
        {
            **_TABLE,
            "seq_lens": Tensor(_INDEX, "batch"),
            "out_cache_loc": Tensor(_LONG, "_"),
            **dict.fromkeys(("pool_len", "topk", "num_steps"), _INTEGER),
        },
        f"{_CPU}/spec.cpp",
    ),
    "sgl_kernel.build_draft_decode_metadata_cpu": Contract(
        {
            "req_to_token": Tensor(_INT, "requests context"),
            **dict.fromkeys(("req_pool_indices", "seq_lens"), Tensor(_INDEX, "batch")),
            **dict.fromkeys(("topk", "num_steps", "pool_len"), _INTEGER),
        },
        f"{_CPU}/spec.cpp",
    ),
    "sgl_kernel.fill_bonus_tokens_cpu": Contract(
        {
            "accept_tokens": Tensor(_INT),
            **dict.fromkeys(("accept_lens", "bonus_tokens"), Tensor(_INT, "batch")),
            "accept_stride": _INTEGER,
        },
        f"{_CPU}/spec.cpp",
    ),
    "sgl_kernel.fill_accept_out_cache_loc_cpu": Contract(
        {
            "accept_index": Tensor(_INDEX),
            **dict.fromkeys(("out_cache_loc", "accept_out_cache_loc"), Tensor(_LONG, "_")),
        },
        f"{_CPU}/spec.cpp",
    ),
    "sgl_kernel.copy_all_layer_kv_cache_cpu": Contract(
        {
            "data_ptrs": Tensor(torch.uint64, "buffers"),
            "strides": Tensor(_LONG, "buffers"),
            "tgt_loc": Tensor(_INDEX, "slots"),
            "src_loc": Tensor("tgt_loc", "slots"),
        },
        f"{_CPU}/store_cache.cpp",
    ),
    "sgl_kernel.decode_attention_cpu": Contract(
        {
            "query": Tensor(_HALF, "tokens heads _", "rows"),
            "k_cache": Tensor(_CACHE, "slots kv_heads _", "rows"),
            "v_cache": Tensor("k_cache", "slots kv_heads value", "rows"),
            **dict.fromkeys(("k_scale", "v_scale"), _NUMBER),
            "output": Tensor("query", "tokens heads value"),
            "key": Tensor("query", "batch kv_heads _", "rows", optional=True),
            "value": Tensor("query", "batch kv_heads value", "rows", optional=True),
            "loc": Tensor(_LONG, "_"),
            "attn_logits": Tensor(_FLOAT, "batch heads _ _"),
            "req_to_token": Tensor(_INDEX, "requests context"),
            **dict.fromkeys(("req_pool_indices", "seq_lens"), Tensor(_LONG, "batch")),
            **_ATTENTION,
        },
        f"{_CPU}/decode.cpp",
    ),
    "sgl_kernel.extend_attention_cpu": Contract(
        {
            "q_extend": Tensor(_HALF, "tokens heads _", "rows"),
            **dict.fromkeys(("k_extend", "v_extend"), Tensor("q_extend", "tokens _ _", "rows", optional=True)),
            "o_extend": Tensor("q_extend", "tokens heads _"),
            "k_buffer": Tensor(_CACHE, "slots kv_heads _", "rows"),
            "v_buffer": Tensor("k_buffer", "slots kv_heads _", "rows"),
            **dict.fromkeys(("k_scale", "v_scale"), _NUMBER),
            "req_to_token": Tensor(_INDEX, "requests context"),
            **dict.fromkeys(("req_pool_indices", "seq_lens"), Tensor(_LONG, "batch")),
            **dict.fromkeys(("extend_seq_lens", "extend_start_loc"), Tensor("req_to_token", "batch")),
            "max_len_extend": _INTEGER,
            **_ATTENTION,
            "tree_mask": Tensor(torch.bool, "_", optional=True),
            "is_causal": Value(bool),
        },
        f"{_CPU}/extend.cpp",
    ),
    "sgl_kernel.apply_token_bitmask_inplace_cuda": Contract(
        {
            "logits": Tensor((_FLOAT, *_HALF), "rows _"),
            "bitmask": Tensor(_INT, "_ _"),
            "indices": Tensor(_INT, "_", optional=True),
        },
        "sgl-kernel/csrc/grammar/apply_token_bitmask_inplace_cuda.cu",
        ("logits",),
        (Rule("bitmask", "32 tokens a word", lambda g: g["bitmask"].shape[1] * 32 >= g["logits"].shape[1]),),
    ),
    # SGLang compiles these two with hipcc at their first use.
    "sglang_jit.store_cache": Contract(
        {
            "k": Tensor((*_HALF, _FLOAT), "tokens row", "rows"),
            "v": Tensor("k", "tokens value", "rows"),
            "k_cache": Tensor("k", "slots row", "rows"),
            "v_cache": Tensor("k", "slots value", "rows"),
            "indices": Tensor(_INDEX, "tokens", "any"),
            **_SPLIT,
            **dict.fromkeys(("size_limit", "reserved_skip_index"), _INTEGER),
        },
        "sglang/kernels/jit/csrc/elementwise/kvcache.cuh",
        ("k_cache", "v_cache"),
        contents=(Rule("indices", "slots below size_limit", lambda g: within(g["indices"], g["size_limit"])),),
    ),
    "sglang_jit.clamp_position": Contract(
        {"dst": Tensor(_INDEX, "batch"), "seq_lens": Tensor("dst", "batch")},
        "sglang/kernels/jit/csrc/elementwise/clamp_position.cuh",
        ("dst",),
    ),
    "sgl_kernel.silu_and_mul": Contract(
        {"input": Tensor((_FLOAT, *_HALF)), "out": Tensor("input", optional=True)},
        "sgl-kernel/csrc/elementwise/activation.cu",
        ("out",),
        (Rule("out", "half as wide as input", lambda g: 2 * g["out"].shape[-1] == g["input"].shape[-1]),),
    ),
    # The kernel reads the cache in the type of the query.
    "sgl_kernel.rotary_embedding": Contract(
        {
            "positions": Tensor(_LONG),
            "query": Tensor((_FLOAT, *_HALF), layout="rows"),
            "key": Tensor("query", layout="rows", optional=True),
            "head_size": _INTEGER,
            "cos_sin_cache": Tensor("query", "positions_limit rotary"),
            "is_neox": Value(bool),
        },
        "sgl-kernel/csrc/elementwise/pos_enc.cu",
        ("query", "key"),
        contents=(
            Rule("positions", "rows of cos_sin_cache", lambda g: within(g["positions"], len(g["cos_sin_cache"]))),
        ),
    ),
}


def _drafts(given: Given) -> int:
    return int(given["retrive_index"].shape[1])


def _mask_bytes(given: Given) -> int:
    """Return the bytes that the kernel writes: of mode 0, FULL_MASK, the host knows no bound."""
    drafts, mode = given["retrive_index"].numel(), given["tree_mask_mode"]
    width = 4 if _drafts(given) > 16 else 2 if _drafts(given) > 8 else 1
    return int({1: drafts * _drafts(given), 2: drafts * width}.get(mode, 0))


# 0.5.23 compiles these two from its own copy of the source, which checks more.
_TREE = "sglang/kernels/jit/csrc/speculative/tree.cuh of 0.5.23"
_EXACTLY = (
    Rule(
        "parent_list",
        "topk * (depth - 1) + 1 parents",
        lambda g: g["depth"] == 1 or g["parent_list"].shape[1] == g["topk"] * (g["depth"] - 1) + 1,
    ),
    Rule("selected_index", "one less than drafts", lambda g: g["selected_index"].shape[1] == _drafts(g) - 1),
    Rule("positions", "a position for each draft", lambda g: len(g["positions"]) == g["retrive_index"].numel()),
    Rule("topk", "at least 1", lambda g: g["topk"] > 0),
    Rule("depth", "at least 1", lambda g: g["depth"] > 0),
    Rule("tree_mask_mode", "0, 1 or 2", lambda g: 0 <= g["tree_mask_mode"] <= 2),
)
_verify, _build = (SGL_KERNEL[f"sgl_kernel.{_name}"] for _name in ("verify_tree_greedy", "build_tree_kernel_efficient"))
SGL_KERNEL["sglang_jit.verify_tree_greedy"] = _verify._replace(
    source=_TREE,
    sizes=(Rule("predicts", "a token for each draft", lambda g: len(g["predicts"]) == g["candidates"].numel()),),
)
SGL_KERNEL["sglang_jit.build_tree_kernel_efficient"] = _build._replace(
    source=_TREE,
    arguments={**_build.arguments, "tree_mask": Tensor((torch.bool, torch.uint8, torch.uint16, torch.uint32), "_")},
    sizes=(*_build.sizes, *_EXACTLY),
)

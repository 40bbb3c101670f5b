"""The contracts of AITER's functions on the path of the recipes; see `contracts.py`.

SGLang's AITER attention, layer norms, sampler, routing and unquantized linear layers call them. Most of these functions
read pointers without a check.
"""

from __future__ import annotations

import torch

from . import aiter_rules as rules
from .contracts import Arguments, Contract, Given, Rule, Tensor, Value, within

_INT, _FLOAT, _BF16, _FP8 = torch.int32, torch.float32, torch.bfloat16, torch.float8_e4m3fnuz
_HALF = (_BF16, torch.float16)
_ANY = (_FLOAT, *_HALF)
_NUMBER, _INTEGER, _FLAG = Value((int, float)), Value(int), Value(bool)
_INDEX, _MAYBE_INDEX = Tensor(_INT, "_"), Tensor(_INT, "_", optional=True)
_MAYBE_INTEGER, _MAYBE_NUMBER = Value(int, optional=True), Value((int, float), optional=True)
_MAYBE_FLAG, _MAYBE_DTYPE, _MAYBE_PAIR = (Value(kind, optional=True) for kind in (bool, torch.dtype, tuple))
_MAYBE_FLOATS = Tensor(_FLOAT, optional=True)
_MAYBE_OUT = Tensor((*_HALF, _FP8), optional=True)

_MLA: Arguments = {
    "q": Tensor(_BF16, "tokens heads head"),
    "kv_buffer": Tensor(_BF16, "pages _ 1 head"),
    "o": Tensor(_BF16, "tokens heads value"),
    **dict.fromkeys(("qo_indptr", "kv_indptr"), Tensor(_INT, "bounds")),
    **dict.fromkeys(("kv_indices", "kv_last_page_lens"), _INDEX),
    "max_seqlen_q": _INTEGER,
}
# Sizes and types are those that get_mla_metadata_info_v1 returns.
_PLAN = ("work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map", "reduce_partial_map")
_NORM: Arguments = {
    "input": Tensor(_ANY, "rows hidden", "rows"),
    "weight": Tensor("input", "hidden"),
    "epsilon": _NUMBER,
}


def _contiguous_rows(argument: str) -> Rule:
    """The kernel for float32, and for rows over 8192, gets the stride of the input alone."""

    def holds(given: Given) -> bool:
        x = given["input"]
        own_strides = x.element_size() == 2 and x.shape[-1] <= 8192 and not given.get("use_model_sensitive_rmsnorm")
        return bool(own_strides or given[argument].is_contiguous())

    return Rule(argument, "contiguous rows", holds)


def _in_tiles(n: int, k: int) -> bool:
    return k >= 192 and n % 64 == k % 64 == 0


AITER: dict[str, Contract] = {
    "aiter.mla.mla_decode_fwd": Contract(
        {
            **_MLA,
            **dict.fromkeys(("page_size", "nhead_kv"), _MAYBE_INTEGER),
            **dict.fromkeys(("sm_scale", "logit_cap"), _MAYBE_NUMBER),
            "num_kv_splits": _MAYBE_INTEGER,
            "num_kv_splits_indptr": _MAYBE_INDEX,
            "work_meta_data": Tensor(torch.uint64, optional=True),
            **{name: Tensor(_INT, optional=True) for name in _PLAN},
            **dict.fromkeys(("q_scale", "kv_scale"), _MAYBE_FLOATS),
            **dict.fromkeys(("intra_batch_mode", "return_logits", "return_lse"), _MAYBE_FLAG),
            "g_kv_indptr": _MAYBE_INDEX,
            **dict.fromkeys(("cp_world_size", "cp_rank"), _MAYBE_INTEGER),
            "causal": _MAYBE_FLAG,
        },
        "aiter/mla.py and csrc/py_itfs_cu/asm_mla.cu of e4048607",
        ("o",),
        rules.DECODE_SIZES,
        rules.DECODE_CONTENTS,
    ),
    "aiter.mla.mla_prefill_fwd": Contract(
        {
            **_MLA,
            **dict.fromkeys(("sm_scale", "logit_cap"), _MAYBE_NUMBER),
            "num_kv_splits": _MAYBE_INTEGER,
        },
        "aiter/mla.py and csrc/py_itfs_cu/asm_mla.cu of e4048607",
        ("o",),
        rules.PREFILL_SIZES,
        rules.PREFILL_CONTENTS,
    ),
    "aiter.flash_attn_varlen_func": Contract(
        {
            "q": Tensor((*_HALF, _FP8), "tokens heads head", "rows"),
            "k": Tensor("q", "keys kv_heads head", "rows"),
            "v": Tensor("q", "keys kv_heads _", "rows"),
            **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), Tensor(_INT, "bounds")),
            **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), _INTEGER),
            "min_seqlen_q": _MAYBE_INTEGER,
            **dict.fromkeys(("dropout_p", "softmax_scale", "logits_soft_cap"), _MAYBE_NUMBER),
            "causal": _MAYBE_FLAG,
            "window_size": _MAYBE_PAIR,
            "bias": Tensor(_ANY, "_ _", "rows", optional=True),
            "alibi_slopes": Tensor(_FLOAT, layout="rows", optional=True),
            **dict.fromkeys(("deterministic", "return_lse", "return_attn_probs"), _MAYBE_FLAG),
            "how_v3_bf16_cvt": _MAYBE_INTEGER,
            "block_table": Tensor(_INT, "_ _", "rows", optional=True),
            "out": _MAYBE_OUT,
            **dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_k_padded"), _MAYBE_INDEX),
            "sink_ptr": Tensor(_FLOAT, "heads", optional=True),
        },
        "aiter/ops/mha.py and csrc/py_itfs_ck/mha_varlen_fwd_kernels.cu of e4048607",
        ("out",),
        rules.head("q", "v"),
        rules.RAGGED_CONTENTS,
    ),
    # Keys and values are linear with 3 or 4 dimensions, or vectorised with 5.
    "aiter.mha_batch_prefill_func": Contract(
        {
            "q": Tensor((*_HALF, _FP8), "tokens heads head", "rows"),
            **dict.fromkeys(("k", "v"), Tensor("q", layout="rows")),
            **dict.fromkeys(("cu_seqlens_q", "kv_indptr"), Tensor(_INT, "bounds")),
            "kv_page_indices": Tensor(_INT),
            **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), _INTEGER),
            **dict.fromkeys(("dropout_p", "softmax_scale", "logits_soft_cap"), _MAYBE_NUMBER),
            "causal": _MAYBE_FLAG,
            "window_size": _MAYBE_PAIR,
            "alibi_slopes": Tensor(_FLOAT, layout="rows", optional=True),
            **dict.fromkeys(("deterministic", "return_lse", "return_attn_probs"), _MAYBE_FLAG),
            "out": _MAYBE_OUT,
            "kv_last_page_lens": _MAYBE_INDEX,
            "block_table": Tensor(_INT, "_ _", "rows", optional=True),
            "seqlen_k": _MAYBE_INDEX,
            **dict.fromkeys(("q_descale", "k_descale", "v_descale"), _MAYBE_FLOATS),
            "kv_block_descale": Tensor(_FLOAT, "_ _ 2", optional=True),
            "sink_ptr": Tensor(_FLOAT, "heads", optional=True),
            "sink_size": _MAYBE_INTEGER,
        },
        "aiter/ops/mha.py and csrc/py_itfs_ck/mha_batch_prefill_kernels.cu of e4048607",
        ("out",),
        rules.head("q", "v"),
        rules.BATCH_PREFILL_CONTENTS,
    ),
    "aiter.paged_attention_ragged": Contract(
        {
            "out": Tensor(_HALF, "tokens heads head"),
            "workspace_buffer": Tensor(torch.uint8),
            "query": Tensor(_HALF, "tokens heads head", "rows"),
            "key_cache": Tensor((*_HALF, _FP8, torch.uint8), layout="rows"),
            "value_cache": Tensor("key_cache", layout="rows"),
            "scale": _NUMBER,
            **dict.fromkeys(("kv_indptr", "kv_page_indices", "kv_last_page_lens"), _INDEX),
            **dict.fromkeys(("block_size", "max_num_partitions"), _INTEGER),
            "alibi_slopes": Tensor(_FLOAT, "heads", optional=True),
            **dict.fromkeys(("kv_cache_dtype", "kv_cache_layout"), Value(str)),
            "logits_soft_cap": _NUMBER,
            **dict.fromkeys(("k_scale", "v_scale"), Tensor(_FLOAT)),
            "fp8_out_scale": _MAYBE_FLOATS,
            **dict.fromkeys(("partition_size", "mtp"), _MAYBE_INTEGER),
        },
        "aiter/ops/attention.py and csrc/cpp_itfs/pa/pa_ragged.py of e4048607",
        ("out", "workspace_buffer"),
        rules.PAGED_SIZES,
        rules.PAGED_CONTENTS,
    ),
    "aiter.rmsnorm2d_fwd": Contract(
        {**_NORM, "use_model_sensitive_rmsnorm": _MAYBE_INTEGER},
        "aiter/ops/rmsnorm.py and csrc/kernels/rmsnorm_quant_kernels.cu",
    ),
    "aiter.rmsnorm2d_fwd_with_add": Contract(
        {
            "out": Tensor("input", "rows hidden", "rows"),
            "input": _NORM["input"],
            **dict.fromkeys(("residual_in", "residual_out"), Tensor("input", "rows hidden", "rows")),
            "weight": _NORM["weight"],
            "epsilon": _NUMBER,
            "gemma_norm": _MAYBE_FLAG,
            "use_model_sensitive_rmsnorm": _MAYBE_INTEGER,
        },
        "aiter/ops/rmsnorm.py and csrc/kernels/rmsnorm_quant_kernels.cu of e4048607",
        ("out", "residual_out"),
        tuple(map(_contiguous_rows, ("out", "residual_in", "residual_out"))),
    ),
    "aiter.layernorm2d_fwd": Contract(
        {
            "input": _NORM["input"],
            "weight": _NORM["weight"],
            "bias": Tensor("input", "hidden"),
            "epsilon": _MAYBE_NUMBER,
            "x_bias": Tensor("input", "hidden", optional=True),
        },
        "aiter/ops/norm.py",
    ),
    # Without quantization it takes bfloat16 or float16; the other arguments belong to quantization.
    "aiter.ops.fused_qk_rmsnorm_group_quant.fused_qk_rmsnorm": Contract(
        {
            "q_out_quantized": Tensor("q", "tokens hidden"),
            "k_out": Tensor("q", "tokens latent"),
            "q": Tensor(_HALF, "tokens hidden", "rows"),
            "q_weight": Tensor("q", "hidden"),
            "q_epsilon": _NUMBER,
            "k": Tensor("q", "tokens latent", "rows"),
            "k_weight": Tensor("q", "latent"),
            "k_epsilon": _NUMBER,
            "quant_type": _INTEGER,
        },
        "aiter/ops/fused_qk_rmsnorm_group_quant.py and csrc/kernels/fused_qk_norm.cu",
        ("q_out_quantized", "k_out"),
    ),
    # The kernels read cosines in the type of the input; int64 positions are the build's default.
    "aiter.rope_cached_positions_2c_fwd_inplace": Contract(
        {
            "input_x": Tensor(_HALF, "1 tokens _ rotary", "rows"),
            "input_y": Tensor("input_x", "1 tokens _ rotary", "rows"),
            **dict.fromkeys(("cos", "sin"), Tensor("input_x", "limit 1 1 half")),
            "positions": Tensor(torch.int64, "1 tokens"),
            "rotate_style": _INTEGER,
            **dict.fromkeys(("reuse_freqs_front_part", "nope_first"), _FLAG),
        },
        "aiter/ops/rope.py and csrc/kernels/rope/general_2c_cached_positions_fwd_kernels.cu",
        ("input_x", "input_y"),
        contents=(Rule("positions", "rows of cos", lambda g: within(g["positions"], len(g["cos"]))),),
    ),
    "aiter.ops.sample.greedy_sample": Contract(
        {"out": Tensor(_INT, "rows"), "input": Tensor(_ANY, "rows vocabulary", "rows")},
        "csrc/kernels/sample_kernels.cu",
        ("out",),
    ),
    "aiter.biased_grouped_topk": Contract(
        {
            "gating_output": Tensor(_ANY, "tokens experts", "rows"),
            "correction_bias": Tensor("gating_output", "experts"),
            "topk_weights": Tensor(_FLOAT, "tokens topk", "rows"),
            "topk_ids": Tensor(_INT, "tokens topk", "rows"),
            **dict.fromkeys(("num_expert_group", "topk_group"), _INTEGER),
            "need_renorm": _FLAG,
            "routed_scaling_factor": _MAYBE_NUMBER,
        },
        "aiter/ops/topk.py and csrc/kernels/topk_softmax_kernels_group.cu of e4048607",
        ("topk_weights", "topk_ids"),
        (
            rules.same_strides("topk_weights", "topk_ids", 0),  # the kernel gets that of the ids
            Rule("topk_ids", "at most the experts", lambda g: g["topk_ids"].shape[1] <= g["gating_output"].shape[1]),
        ),
    ),
    "aiter.tuned_gemm.tgemm.mm": Contract(
        {
            "inp": Tensor((*_HALF, _FP8), layout="rows"),
            "weights": Tensor("inp", "n k", "rows"),
            "bias": Tensor((*_HALF, _FLOAT), "n", optional=True),
            "otype": _MAYBE_DTYPE,
            **dict.fromkeys(("scale_a", "scale_b", "scale_c"), _MAYBE_FLOATS),
        },
        "aiter/tuned_gemm.py",
        sizes=(Rule("weights", "the columns of inp", lambda g: g["weights"].shape[1] == g["inp"].shape[-1]),),
    ),
    # The kernel reads rows without a stride, and its choice has these sizes: rowwise_heuristic_dispatch of c16d44b.
    "aiter.per_token_quant_hip": Contract(
        {
            "x": Tensor(_HALF, "tokens k"),
            "scale": _MAYBE_FLOATS,
            "quant_dtype": Value(torch.dtype),
        },
        "aiter/ops/quant.py and csrc/kernels/quant_kernels.cu",
    ),
    "aiter.gemm_a8w8_bpreshuffle": Contract(
        {
            "XQ": Tensor(_FP8, "tokens k"),
            "WQ": Tensor(_FP8, "n k"),
            "x_scale": Tensor(_FLOAT, "tokens 1"),
            "w_scale": Tensor(_FLOAT, "n 1"),
            "bias": Tensor(_ANY, "n", optional=True),
            "dtype": _MAYBE_DTYPE,
        },
        "aiter/ops/gemm_op_a8w8.py",
        sizes=(Rule("WQ", "64 outputs, 192 inputs or more, in sixty-fours", lambda g: _in_tiles(*g["WQ"].shape)),),
    ),
}

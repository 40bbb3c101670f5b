"""The virtual gfx942 device: planted faults, each noticed by name, and what must work beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kimi_w4a8_laptop import virtual
from kimi_w4a8_laptop.contract_check import CONTRACTS
from kimi_w4a8_laptop.virtual import library

TESTS = Path(__file__).parents[1]
CAPTURE = "operation not permitted when stream is capturing: "
TWO_DEVICES = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
# The message that names each fault of the program.
NOTICED = {
    "a draw in int32": "sgl_kernel.verify_tree_greedy: target_predict is torch.int32, expected torch.int64",
    "a transposed tensor": "candidates is strides (1, 2)",
    "strides of a wider tensor": "candidates is strides (8, 2)",
    "a missing argument": "retrive_index is missing",
    "a batch of another size": "target_predict is shape [2, 4]",
    "a host tensor in an operator": "target_predict is cpu, expected cuda",
    "another GPU in an operator": "target_predict is cuda:1",
    "host and device in one sum": f"{TWO_DEVICES}cpu",
    "two GPUs in one sum": f"{TWO_DEVICES}cuda:1",
    "numpy of a device tensor": "can't convert cuda:0 device type tensor to numpy",
    "item in a capture": f"{CAPTURE}synchronization in aten::_local_scalar_dense",
    "tolist in a capture": f"{CAPTURE}synchronization in to host",
    "cpu in a capture": f"{CAPTURE}synchronization in to host",
    "a boolean mask in a capture": f"{CAPTURE}synchronization in aten::nonzero",
    "nonzero in a capture": f"{CAPTURE}synchronization in aten::nonzero",
    "a pageable copy in a capture": f"{CAPTURE}pageable copy in to device",
    "indices of the host in a capture": f"{CAPTURE}pageable copy in to device",
    "synchronize in a capture": f"{CAPTURE}synchronize of device",
    "a forgotten wait": "race: aten::sum reads aten::add",
    "an event recorded too early": "race: aten::sum reads aten::mul",
    "a buffer overwritten while it is read": "race: aten::fill_ overwrites what is read by aten::sum",
    "a name that AITER lacks": "aiter.fused_moe_of_another_release has no stand-in",
    "greedy_sample into int64": "aiter.ops.sample.greedy_sample: out is torch.int64",
    "page indices in int64": "aiter.paged_attention_ragged: kv_page_indices is torch.int64",
    "a window that no stand-in computes": "aiter.flash_attn_varlen_func: the stand-in does not compute with window",
    "one query a request instead of four": "mla_decode_fwd: max_seqlen_q is 1, expected the queries of each request",
    "a page table that is too short": "kv_indices is torch.int32 [7] [1, 2, 3, 4, 5, 6, 7], expected as many as",
    "a page of -1": "kv_indices is torch.int32 [9] [1, 2, 3, 4, -1, 6, 7, 8, 9], expected pages of kv_buffer",
    "a page beyond the cache": "kv_page_indices is torch.int32 [5] [7, 1, 8, 4, 3], expected pages of key_cache",
    "bounds that end before the query": "qo_indptr is torch.int32 [3] [0, 0, 0], expected the last bound at the",
    "bounds that fall": "kv_indptr is torch.int32 [3] [0, 5, 3], expected 0, and then no number",
    "8 heads in a verify": "mla_decode_fwd: q is torch.bfloat16 [8, 8, 12], expected a kernel for these heads",
    "12 heads in a verify": "mla_decode_fwd: q is torch.bfloat16 [8, 12, 12], expected a kernel for these heads",
    "8 heads in a prefill": "mla_prefill_fwd: q is torch.bfloat16 [8, 8, 12], expected 16 or 128 heads",
    "a workspace of one byte": "workspace_buffer is torch.uint8 [1], expected two floats and a head",
    "one length of a last page for two requests": "kv_last_page_lens is torch.int32 [1], expected one for each",
    "two bounds for two queries": "kv_indptr is torch.int32 [2], expected a bound more than queries",
    "no partition": "max_num_partitions is 0, expected as many as the longest sequence has",
    "a pinned copy that is read too early": "race: the host reads pinned memory before the copy",
    "a pinned source that is overwritten": "race: the host overwrites pinned memory before",
    "a tensor that Triton reads": "race: aten::fill_ overwrites what is read by triton copy_kernel",
    "a tensor that Triton writes": "race: aten::sum reads triton copy_kernel",
    "a tensor that AITER reads": "race: aten::fill_ overwrites what is read by aiter.rmsnorm2d_fwd",
    "causal=False in a verify": "mla_decode_fwd: the stand-in does not compute with causal=False",
    "a cap of 1.0": "paged_attention_ragged: the stand-in does not compute with logits_soft_cap=1.0",
    "True for one page": "mla_decode_fwd: page_size is bool",
    "parents of another depth (0.5.23)": "parent_list is torch.int64 [2, 3], expected topk * (depth - 1) + 1 parents",
    "positions of a larger batch (0.5.23)": "positions is torch.int64 [16], expected a position for each draft",
    "a mask for fewer drafts": "tree_mask is torch.bool [16], expected room for its mode",
    "other strides of values than of keys": "with strides (32, 32, 16, 1), expected the strides of key_cache",
    "weights with another row stride than ids": "topk_weights is torch.float32 [4, 2] with strides (4, 1), expected",
    "heads of 264": "q is torch.bfloat16 [2, 2, 264], expected heads of at most 256, a multiple of 8",
    "a strided float32 output of a norm": "out is torch.float32 [4, 8] with strides (16, 1), expected contiguous rows",
    # Kinds that are not above, at the call sites of serving code.
    "a slot at the end of the cache": "sglang_jit.store_cache: indices is torch.int64 [2] [0, 4], expected slots below",
    "float16 keys in a bfloat16 cache": "sglang_jit.store_cache: k_cache is torch.bfloat16, expected torch.float16",
    "a position beyond the cosines": "positions is torch.int64 [1, 2] [[0, 4]], expected rows of cos",
    "cosines in float32": "aiter.rope_cached_positions_2c_fwd_inplace: cos is torch.float32, expected torch.bfloat16",
    "a grammar's mask of another vocabulary": "bitmask is torch.int32 [2, 1], expected 32 tokens a word",
    "an activation as wide as its input": "sgl_kernel.silu_and_mul: out is torch.bfloat16 [2, 8], expected half as",
    "a projection with transposed weights": "aiter.tuned_gemm.tgemm.mm: weights is torch.bfloat16 [2, 2], expected",
    "swapped weights of two norms": "fused_qk_rmsnorm: q_weight is shape [4], expected [hidden]",
    "FP8 of strided rows": "aiter.per_token_quant_hip: x is strides (8, 2), expected layout contiguous",
    "an FP8 product of too few inputs": "aiter.gemm_a8w8_bpreshuffle: WQ is torch.float8_e4m3fnuz [64, 128], expected",
    "a draw into a row too few": "greedy_sample: input is shape [2, 8], expected [rows vocabulary] with {'rows': 1}",
    "a replay after a reset": "Called CUDAGraph::replay without a preceding successful capture",
    "an operator of a graph on freed memory": "a graph's aten::copy_ uses memory that was freed since its capture",
    "a kernel of a graph on freed memory": "bytes that no tensor of the device holds as a whole",
    "a capture in a capture": f"{CAPTURE}a capture begins in another",
    "a query of an event in a capture": f"{CAPTURE}query of event",
    "a reduction by maximum": "an NCCL reduction with operation 2 has no stand-in",
    "a reduction of more than the buffer": "ncclAllReduce reads 32 bytes that no tensor of the device holds as a whole",
    "a kernel that stores beyond its tensor": "triton copy_kernel: RuntimeError('it touches 32 bytes that no tensor",
    "a share in the place of another rank": "ncclReduceScatter: its buffers overlap",
    "expert ids in int64": "topk_ids is torch.int64",
    "an expert of another rank": "w4a8_moe: topk_ids names expert 4, expected one of 4",
    "an expert map that is one off": "w4a8_moe: topk_ids names 1 for the router's expert 6, expected 2, where",
    "a link beyond the drafts": "retrive_index is torch.int64 [1, 4] [[4, 4, 4, 4]], expected places of predicts",
    "an FP8 cache for BF16 queries": "mla_decode_fwd: kv_buffer is torch.float8_e4m3fnuz, expected torch.bfloat16",
    "no split of the keys": "mla_decode_fwd: num_kv_splits is 0, expected at least 1",
    "an output wider than the cache": "mla_decode_fwd: o is torch.bfloat16 [8, 16, 16], expected heads no wider than",
    "heads that share no key head": "k is torch.bfloat16 [2, 2, 8], expected heads that divide those of q",
    "more experts of a token than there are": "topk_ids is torch.int32 [4, 2], expected at most the experts",
    "two tokens on a page of one": "mla_decode_fwd: the stand-in does not compute with kv_last_page_lens=",
    "a wait for an event that was never recorded": "race: aten::sum reads aten::add",
    "a row short of the drafts": "predicts is torch.int32 [3], expected a token for each draft",
    "places of the step before": "accept_index is torch.int32 [1, 4] [[0, 0, 0, 0]], expected -1, which the kernel",
    "three drafts in links of four": "draft_token_num is 3, expected the drafts of a request",
    "a draft too many (0.5.23)": "selected_index is torch.int64 [2, 4], expected one less than drafts",
    "no branch (0.5.23)": "sglang_jit.build_tree_kernel_efficient: topk is 0, expected at least 1",
    "no depth (0.5.23)": "sglang_jit.build_tree_kernel_efficient: depth is 0, expected at least 1",
    "an unknown mode of the mask (0.5.23)": "tree_mask_mode is 3, expected 0, 1 or 2",
    "a position beyond the table": "positions is torch.int64 [2] [0, 2], expected rows of cos_sin_cache",
    "a row of a verify that no request has": "qo_indptr is torch.int32 [3] [0, 4, 8], expected the last bound at the",
    "bounds of a prefill that fall": "mla_prefill_fwd: qo_indptr is torch.int32 [3] [0, 9, 8], expected 0, and then no",
    "a prefill that is longer than it says": "max_seqlen_q is 3, expected at least the longest sequence of qo_indptr",
    "values of 264": "v is torch.bfloat16 [2, 2, 264], expected heads of at most 256, a multiple of 8",
    "bounds of queries that fall": "cu_seqlens_q is torch.int32 [3] [0, 3, 2], expected 0, and then no number",
    "bounds beyond the queries": "cu_seqlens_q is torch.int32 [2] [0, 3], expected the last bound at the end of q",
    "more queries than it says": "max_seqlen_q is 1, expected at least the longest sequence of cu_seqlens_q",
    "bounds of keys that fall": "cu_seqlens_k is torch.int32 [3] [0, 3, 2], expected 0, and then no number",
    "bounds beyond the keys": "cu_seqlens_k is torch.int32 [2] [0, 3], expected the last bound within k",
    "more keys than it says": "max_seqlen_k is 1, expected at least the longest sequence of cu_seqlens_k",
    "a prefill's table that is too short": "kv_page_indices is torch.int32 [2] [1, 2], expected as many as the last",
    "a prefill's page beyond the cache": "kv_page_indices is torch.int32 [3] [1, 2, 4], expected pages of k",
    "one length of a last page for two queries": "kv_last_page_lens is torch.int32 [1], expected one for each query",
    "a strided float32 residual of a norm": "residual_in is torch.float32 [4, 8] with strides (16, 1), expected",
    "a strided float32 sum of a norm": "residual_out is torch.float32 [4, 8] with strides (16, 1), expected contiguous",
    "seeds on the host": "triton draw_kernel: its tensors are on cpu, cuda:0, expected one GPU",
    "seeds on another GPU": "triton draw_kernel: its tensors are on cuda:0, cuda:1, expected one GPU",
}
# What must work beside them.
HEALTHY = {
    "devices": ["cuda:0", "cuda:3", "cuda:2", "cuda:0"],
    "on a GPU": True,
    "draw": [True, "torch.int64", ["triton draw_kernel"]],
    "attended into out": True,
    "wrong of ours": [],
    "summed over ranks": [[1.0, 1.0, 1.0], [0.0, 3.0], [6.0, 9.0]],
    "after a wait": "not noticed",
    "replayed": 5.0 * 3 * 3,
    # A compiled frame begins with the current stream, so Dynamo must not trace the node's Python that returns it.
    "compiled": [41.0, 42.0],
    "copied": [[1, 2, 3], [4, 5, 6, 7]],  # without the interpreter, as SGLang 0.5.23 does in each verify step
    # A GPU multiplies by a number's reciprocal, and divides by a tensor.
    "divided": [True, False, True],
    "quantized": True,  # as on a CPU; with a quotient elements of a8 differed, and no layer passed its check
    "counted": {
        "launch": {"aten::add": 1, "aten::copy_": 3},
        "synchronization": {"to host": 1},
        "pageable copy": {"to device": 1},
        "host copy": {"to device": 1},
    },
}


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    if library.compiler() is None:
        pytest.skip("the virtual device is compiled with g++, which is not installed")
    command = [sys.executable, "-m", "support.virtual_device_program"]
    environment = {**os.environ, **virtual.ENVIRONMENT, "PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS)))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("fault", NOTICED)
def test_the_fault_is_noticed_by_name(fault: str, said: dict[str, Any]) -> None:
    assert NOTICED[fault] in said["faults"][fault]


def test_each_planted_fault_has_its_message(said: dict[str, Any]) -> None:
    assert said["faults"].keys() == NOTICED.keys()


@pytest.mark.parametrize("what", HEALTHY)
def test_what_is_right_works(what: str, said: dict[str, Any]) -> None:
    assert said["healthy"][what] == HEALTHY[what]


def test_each_rule_of_the_contracts_refuses_a_planted_fault(said: dict[str, Any]) -> None:
    refused = {
        (rule.argument, rule.expected)
        for name, contract in CONTRACTS.items()
        for rule in (*contract.sizes, *contract.contents)
        for message in said["faults"].values()
        if message.startswith(f"{name}: {rule.argument} is ") and f", expected {rule.expected} (" in message
    }
    rules = [rule for contract in CONTRACTS.values() for rule in (*contract.sizes, *contract.contents)]
    assert [rule[:2] for rule in rules if rule[:2] not in refused] == []

"""Calls of operators as an engine on the virtual node makes them; an argument given by name replaces its value.

A process imports it after `virtual.install()`.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import torch

from kimi_w4a8_eagle3.moe.contract import MoeShape, gpu_arch
from kimi_w4a8_eagle3.moe.flydsl.backend import device_of, stream_of
from kimi_w4a8_eagle3.moe.reference import ReferenceBackend
from kimi_w4a8_eagle3.quark.packing import unpack_codes
from kimi_w4a8_eagle3.sampling.draw import Filters, draw
from kimi_w4a8_eagle3.sampling.finite import FiniteLogits
from kimi_w4a8_eagle3.sglang_plugin.model import dense_fp8
from kimi_w4a8_lab.kernels.random_layers import random_layer
from kimi_w4a8_laptop.contract_check import CONTRACTS
from kimi_w4a8_laptop.virtual import rccl
from kimi_w4a8_laptop.virtual.moe import note_routed
from kimi_w4a8_laptop.virtual.operators import STAND_INS

FLOAT32 = 7  # of nccl.h
LINKS = ("candidates", "retrive_index", "retrive_next_token", "retrive_next_sibling", "target_predict")


def verify(**changed: torch.Tensor | None) -> None:
    """Call verify_tree_greedy for one request with three drafts."""
    from sgl_kernel import verify_tree_greedy

    ints = {
        "predicts": torch.zeros(4, dtype=torch.int32, device="cuda"),
        "accept_index": -torch.ones(1, 4, dtype=torch.int32, device="cuda"),
        "accept_token_num": torch.zeros(1, dtype=torch.int32, device="cuda"),
    }
    links = {name: torch.zeros(1, 4, dtype=torch.int64, device="cuda") for name in LINKS}
    verify_tree_greedy(**{name: value for name, value in {**ints, **links, **changed}.items() if value is not None})


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")


def paged(**changed: object) -> None:
    """Decode two sequences of 3 and 2 tokens over pages of one token."""
    from aiter import paged_attention_ragged

    q, cache = torch.zeros(2, 2, 8, device="cuda").bfloat16(), torch.zeros(8, 1, 2, 8, device="cuda").bfloat16()
    one = torch.ones(1, device="cuda")
    values = {
        "out": torch.empty_like(q),
        "workspace_buffer": torch.zeros(2 * 2 * (2 * 4 + 8 * 2), dtype=torch.uint8, device="cuda"),
        "query": q,
        "key_cache": cache,
        "value_cache": cache,
        "scale": 1.0,
        "kv_indptr": ints(0, 3, 5),
        "kv_page_indices": ints(7, 1, 2, 4, 3),
        "kv_last_page_lens": ints(1, 1),
        "block_size": 1,
        "max_num_partitions": 1,
        "alibi_slopes": None,
        "kv_cache_dtype": "auto",
        "kv_cache_layout": "NHD",
        "logits_soft_cap": 0.0,
        "k_scale": one,
        "v_scale": one,
    }
    paged_attention_ragged(**values | changed)


def mla(heads: int = 16, prefill: bool = False, **changed: object) -> None:
    """Verify four tokens of each of two requests, as SGLang's AITER backend does, or prefill them."""
    from aiter.mla import mla_decode_fwd, mla_prefill_fwd

    values = {
        "q": torch.zeros(8, heads, 12, device="cuda").bfloat16(),
        "kv_buffer": torch.zeros(16, 1, 1, 12, device="cuda").bfloat16(),
        "o": torch.zeros(8, heads, 8, device="cuda").bfloat16(),
        "qo_indptr": ints(0, 4, 8),
        "kv_indptr": ints(0, 5, 9),
        "kv_indices": ints(*range(1, 10)),
        "kv_last_page_lens": ints(1, 1),
        "max_seqlen_q": 4,
        "sm_scale": 1.0,
    }
    (mla_prefill_fwd if prefill else mla_decode_fwd)(**values | changed)


def tree(package: str, **changed: object) -> None:
    """Build the tree of two requests with three drafts each."""
    import sgl_kernel
    from sglang.kernels.jit.utils.compile.loader import load_jit

    links = {name: torch.zeros(2, 4, dtype=torch.int64, device="cuda") for name in LINKS[1:4]}
    values = {
        "parent_list": torch.zeros(2, 3, dtype=torch.int64, device="cuda"),
        "selected_index": torch.zeros(2, 3, dtype=torch.int64, device="cuda"),
        "verified_seq_len": torch.ones(2, dtype=torch.int64, device="cuda"),
        "tree_mask": torch.zeros(32, dtype=torch.bool, device="cuda"),
        "positions": torch.zeros(8, dtype=torch.int64, device="cuda"),
        **links,
        "topk": 1,
        "depth": 3,
        "draft_token_num": 4,
        "tree_mask_mode": 1,
    }
    module = sgl_kernel if package == "sgl_kernel" else load_jit()
    module.build_tree_kernel_efficient(*(values | changed).values())


def norm_into_columns(argument: str) -> None:
    """Let the norm of float32 rows read or write every second column of a wider tensor."""
    from aiter import rmsnorm2d_fwd_with_add

    names = ("out", "input", "residual_in", "residual_out")
    values = {name: torch.ones(4, 8, device="cuda") for name in names}
    values[argument] = torch.zeros(4, 16, device="cuda")[:, :8]
    rmsnorm2d_fwd_with_add(**values, weight=torch.ones(8, device="cuda"), epsilon=1e-5)


def route(experts: int = 8) -> None:
    """Let routing choose two experts of a token, and write weights into a wider tensor than ids."""
    gates, bias = torch.zeros(4, experts, device="cuda"), torch.zeros(experts, device="cuda")
    wide, ids = torch.zeros(4, 4, device="cuda"), torch.zeros(4, 2, dtype=torch.int32, device="cuda")
    weights = wide[:, :2] if experts > 1 else wide[:, :2].contiguous()
    STAND_INS["aiter.biased_grouped_topk"](gates, bias, weights, ids, 1, 1, True, 1.0)


def attention(size: int = 8, heads: int = 2, **changed: object) -> torch.Tensor:
    """Attend from two rows of one sequence to its two keys."""
    from aiter import flash_attn_varlen_func

    k, bounds = torch.ones(2, 2, size, device="cuda").bfloat16(), ints(0, 2)
    values = {"q": k[:, :1].repeat(1, heads, 1), "k": k, "v": k, "cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    found: torch.Tensor = flash_attn_varlen_func(
        **{**values, "max_seqlen_q": 2, "max_seqlen_k": 2, "causal": True, **changed}
    )
    return found


def prefill_over(*pages: int) -> None:
    """Prefill two rows of one sequence over these pages of a cache of four."""
    from aiter import mha_batch_prefill_func

    q, cache = torch.ones(2, 2, 8, device="cuda").bfloat16(), torch.ones(4, 2, 8, device="cuda").bfloat16()
    mha_batch_prefill_func(q, cache, cache, ints(0, 2), ints(0, 3), ints(*pages), 2, 3, causal=True)


def rope(positions: int = 1, dtype: torch.dtype = torch.bfloat16) -> None:
    heads, table = torch.zeros(1, 2, 1, 8, device="cuda").bfloat16(), torch.zeros(4, 1, 1, 4, device="cuda").to(dtype)
    places = torch.tensor([[0, positions]], device="cuda")
    STAND_INS["aiter.rope_cached_positions_2c_fwd_inplace"](heads, heads, table, table, places, 0, True, False)


def rotary(positions: int) -> None:
    rows, table = columns(8), columns(4)
    STAND_INS["sgl_kernel.rotary_embedding"](torch.tensor([0, positions], device="cuda"), rows, rows, 8, table, True)


def store(last: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Store two rows in a cache of four, in slot 0 and `last`."""
    rows, cache = torch.zeros(2, 8, device="cuda").to(dtype), torch.zeros(4, 8, device="cuda").bfloat16()
    slots = torch.tensor([0, last], device="cuda")
    splits = {"num_split": 1} if "num_split" in CONTRACTS["sglang_jit.store_cache"].arguments else {}
    values = {"k": rows, "v": rows, "k_cache": cache, "v_cache": cache.clone(), "indices": slots, **splits}
    STAND_INS["sglang_jit.store_cache"](**values, size_limit=4, reserved_skip_index=-1)


def scatter_in_place(rank: int) -> None:
    """Reduce-scatter four numbers over two ranks into the first half of them, which is the share of rank 0."""
    buffer = torch.zeros(4, device="cuda")
    group = SimpleNamespace(
        size=lambda: 2, rank=lambda: rank, reduce_scatter=lambda *_: SimpleNamespace(wait=lambda: None)
    )
    pointer = ctypes.c_void_p(buffer.data_ptr())
    rccl.Gloo().ncclReduceScatter(pointer, pointer, 2, FLOAT32, 0, group, None)


def nccl(rows: int = 4, op: int = 0) -> None:
    buffer, group = torch.zeros(4, device="cuda"), SimpleNamespace(allreduce=lambda _: SimpleNamespace(wait=bool))
    pointer = ctypes.c_void_p(buffer.data_ptr())
    rccl.Gloo().ncclAllReduce(pointer, pointer, rows, FLOAT32, op, group, None)


def moe(expert: int, chosen: int | None = None, dtype: torch.dtype = torch.int32) -> None:
    """Route a row to an expert of this rank, which has experts 4 to 7. chosen: what the router said of them."""
    layer = random_layer(MoeShape(4, 64, 64, 2), torch.device("cpu"))
    prepared = ReferenceBackend().prepare(layer)
    ids = torch.tensor([[-1, expert]], dtype=dtype, device="cuda")
    if chosen is not None:
        places = SimpleNamespace(
            moe_ep_size=2, num_experts=8, _map_global_expert_id_to_local_expert_id=lambda one: max(one - 4, -1)
        )
        note_routed(places, ids, SimpleNamespace(topk_ids=ints(0, chosen)[None]))
    ReferenceBackend().forward(torch.zeros(1, 64, device="cuda").bfloat16(), prepared, torch.ones(1, 2).cuda(), ids)


def fp8_product(device: str, outputs: int = 64, inputs: int = 256) -> torch.Tensor:
    """Return the product of every second column of x and a dense layer that the plugin quantized, on a device."""
    numbers = torch.Generator().manual_seed(0)
    layer = torch.nn.Module()
    weight = torch.randn(outputs, inputs, generator=numbers).bfloat16().to(device)
    layer.weight, layer.quant_method = torch.nn.Parameter(weight, requires_grad=False), None
    dense_fp8.quantize(layer, everywhere=True)
    x = torch.randn(3, 2 * inputs, generator=numbers).bfloat16().to(device)
    return layer.quant_method.apply(layer, x[:, ::2]).float().cpu()


def wrong_of_ours() -> list[str]:
    """Return what of our own code is wrong on the node."""
    on_cpu, logits = fp8_product("cpu"), torch.zeros(6, 640, device="cuda")
    codes = torch.arange(64, dtype=torch.uint8)
    logits[5, 1], finite = float("nan"), FiniteLogits()
    finite.make(logits[:2])
    finite.make(logits)  # a larger batch
    with torch.cuda.stream(side := torch.cuda.Stream()):
        on_stream = stream_of(logits) == side.cuda_stream
    right = {
        "FP8 product": bool((fp8_product("cuda") - on_cpu).norm() < 0.02 * on_cpu.norm()),
        "architecture": gpu_arch(logits.device) == "gfx942",
        "codes": torch.equal(unpack_codes(codes.cuda()).cpu(), unpack_codes(codes)),
        "finite": bool(logits.isfinite().all()),
        "stream of FlyDSL's launches": on_stream,
        "device of FlyDSL's launches": device_of(torch.ones(1, device="cuda:2")) == 2,
    }
    return [name for name in right if not right[name]]


def columns(count: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(2, count, device="cuda").to(dtype)


def drawn(device: str) -> None:
    probs = torch.rand(1, 640, device="cuda")
    filters = Filters(*(torch.tensor(value, device="cuda") for value in ([640], [1.0], [0.0])))
    draw(probs, filters, torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64).cuda())

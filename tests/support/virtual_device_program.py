"""Check the virtual device in a process of its own, because it changes torch for good; print what happened as JSON.

Run by tests/laptop/test_virtual_device.py. `operator_calls.py` has the calls that a fault changes. Each fault maps to
the message that names it, or to "not noticed".
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kimi_w4a8_laptop import virtual

virtual.install()

import torch  # noqa: E402  (the device is installed first, as in an engine)
import torch.distributed as dist  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from kimi_w4a8_eagle3.moe.reference import quantize_rows  # noqa: E402
from kimi_w4a8_eagle3.quark.fp8 import FP8  # noqa: E402
from kimi_w4a8_eagle3.sampling.draw import Filters, draw  # noqa: E402
from kimi_w4a8_laptop.virtual import library, rccl  # noqa: E402
from kimi_w4a8_laptop.virtual.operators import STAND_INS  # noqa: E402

from .operator_calls import (  # noqa: E402
    FLOAT32,
    attention,
    columns,
    drawn,
    fp8_product,
    ints,
    mla,
    moe,
    nccl,
    norm_into_columns,
    paged,
    prefill_over,
    rope,
    rotary,
    route,
    scatter_in_place,
    store,
    tree,
    verify,
    wrong_of_ours,
)


@triton.jit
def copy_kernel(source, target, size: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(target + tl.arange(0, size), tl.load(source + tl.arange(0, size)))


@triton.jit
def _small_copy_kernel(sources, targets, sizes, cols, source_strides, target_strides, widths, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Has the name and arguments of SGLang 0.5.23's, which the node computes without the interpreter."""


def copied() -> list[list[int]]:
    """Return int64 targets that were given int32 sources of one and two dimensions."""
    sources = ints(1, 2, 3), ints(4, 5, 6, 7).view(2, 2)
    targets = tuple(torch.zeros(source.shape, dtype=torch.int64, device="cuda") for source in sources)
    _small_copy_kernel[(2, 1)](sources, targets, (3, 4), (3, 2), ((0, 1), (2, 1)), ((0, 1), (2, 1)), (0, 0), BLOCK=256)
    return [target.flatten().tolist() for target in targets]


def in_capture(action: Callable[[torch.Tensor], object]) -> None:
    tensor = torch.ones(4, device="cuda")
    library.load().vg_capture_begin(1)
    try:
        action(tensor)
    finally:
        library.load().vg_capture_end()
        library.load().vg_forget(1)


def race(
    second: Callable[[torch.Tensor, torch.cuda.Stream], object],
    first: Callable[[torch.Tensor], object] = lambda tensor: tensor.add_(1),
) -> None:
    """Run `first` on a side stream, then `second` on the default stream."""
    tensor, side = torch.zeros(4, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        first(tensor)
    second(tensor, side)


def early_event(tensor: torch.Tensor, side: torch.cuda.Stream) -> None:
    """Wait for an event that was recorded before the work."""
    event = side.record_event()
    with torch.cuda.stream(side):
        tensor.mul_(2)
    torch.cuda.current_stream().wait_event(event)
    tensor.sum()


def missing_name() -> None:
    from aiter import fused_moe_of_another_release  # type: ignore[attr-defined]

    fused_moe_of_another_release(torch.ones(1, device="cuda"))


def pinned(read: bool) -> None:
    """Touch pinned memory on the host while a copy of it is under way."""
    on_host, on_device = torch.zeros(4, pin_memory=True), torch.zeros(4, device="cuda")
    if read:
        on_host.copy_(on_device, non_blocking=True)
        on_host.tolist()
    else:
        on_device.copy_(on_host, non_blocking=True)
        on_host.fill_(1)
    on_device.add_(1)  # the next launch raises what the host did


def beside_triton(reads: bool) -> None:
    """Let a kernel of Triton run on a side stream, and overwrite what it reads, or read what it writes."""
    tensor, out, side = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        copy_kernel[(1,)](tensor, out, 4)
    if reads:
        tensor.fill_(1)
    else:
        out.sum()


def beside_aiter() -> None:
    """Overwrite the gates while AITER reads them."""
    race(lambda x, side: x.fill_(1), lambda x: STAND_INS["aiter.rmsnorm2d_fwd"](x[None], x[0:4], 1e-5))


def on(device: str) -> torch.Tensor:
    return torch.zeros(1, 4, dtype=torch.int64, device=device)


def links(columns: int) -> torch.Tensor:
    return torch.zeros(2, columns, dtype=torch.int64, device="cuda")


def heads(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, device="cuda").bfloat16()


def graph_after_reset() -> None:
    graph, tensor = torch.cuda.CUDAGraph(), torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        tensor.add_(1)
    graph.reset()
    graph.replay()


def freed_after_capture(action: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    graph, out, freed = torch.cuda.CUDAGraph(), columns(8), columns(8)
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        action(freed, out)
    del freed
    graph.replay()


def begin_capture(_: object) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.CUDAGraph().capture_begin()


LINK_BEYOND = torch.full((1, 4), 4, device="cuda")

FAULTS: dict[str, Callable[[], object]] = {
    "a draw in int32": lambda: verify(target_predict=on("cuda").int()),
    "a transposed tensor": lambda: verify(candidates=torch.zeros(4, 2, dtype=torch.int64, device="cuda").T),
    "strides of a wider tensor": lambda: verify(candidates=torch.zeros(2, 8, dtype=torch.int64, device="cuda")[:, ::2]),
    "a missing argument": lambda: verify(retrive_index=None),
    "a batch of another size": lambda: verify(target_predict=on("cuda").expand(2, 4).contiguous()),
    "a host tensor in an operator": lambda: verify(target_predict=on("cpu")),
    "another GPU in an operator": lambda: verify(target_predict=on("cuda:1")),
    "host and device in one sum": lambda: torch.ones(3, device="cuda") + torch.ones(3),
    "two GPUs in one sum": lambda: torch.ones(3, device="cuda:0") + torch.ones(3, device="cuda:1"),
    "numpy of a device tensor": lambda: torch.ones(3, device="cuda").numpy(),
    "item in a capture": lambda: in_capture(lambda x: x[0].item()),
    "tolist in a capture": lambda: in_capture(lambda x: x.tolist()),
    "cpu in a capture": lambda: in_capture(lambda x: x.cpu()),
    "a boolean mask in a capture": lambda: in_capture(lambda x: x[x > 0]),
    "nonzero in a capture": lambda: in_capture(lambda x: x.nonzero()),
    "a pageable copy in a capture": lambda: in_capture(lambda x: x.copy_(torch.ones(4))),
    "indices of the host in a capture": lambda: in_capture(lambda x: x[torch.tensor([0, 1])]),
    "synchronize in a capture": lambda: in_capture(lambda x: torch.cuda.synchronize()),
    "a forgotten wait": lambda: race(lambda x, side: x.sum()),
    "an event recorded too early": lambda: race(early_event),
    "a buffer overwritten while it is read": lambda: race(lambda x, side: x.fill_(3), torch.Tensor.sum),
    "a name that AITER lacks": missing_name,
    "greedy_sample into int64": lambda: STAND_INS["aiter.ops.sample.greedy_sample"](on("cuda")[0], columns(8)),
    "page indices in int64": lambda: paged(kv_page_indices=torch.arange(5, device="cuda")),
    "a window that no stand-in computes": lambda: attention(window_size=(128, 0)),
    "one query a request instead of four": lambda: mla(max_seqlen_q=1),
    "a page table that is too short": lambda: mla(kv_indices=ints(*range(1, 8))),
    "a page of -1": lambda: mla(kv_indices=ints(1, 2, 3, 4, -1, 6, 7, 8, 9)),
    "a page beyond the cache": lambda: paged(kv_page_indices=ints(7, 1, 8, 4, 3)),
    "bounds that end before the query": lambda: mla(qo_indptr=ints(0, 0, 0), prefill=True),
    "bounds that fall": lambda: paged(kv_indptr=ints(0, 5, 3)),
    "8 heads in a verify": lambda: mla(8),
    "12 heads in a verify": lambda: mla(12),
    "8 heads in a prefill": lambda: mla(8, prefill=True),
    "a workspace of one byte": lambda: paged(workspace_buffer=torch.zeros(1, dtype=torch.uint8, device="cuda")),
    "one length of a last page for two requests": lambda: mla(kv_last_page_lens=ints(1)),
    "two bounds for two queries": lambda: paged(kv_indptr=ints(0, 5)),
    "no partition": lambda: paged(max_num_partitions=0),
    "a pinned copy that is read too early": lambda: pinned(read=True),
    "a pinned source that is overwritten": lambda: pinned(read=False),
    "a tensor that Triton reads": lambda: beside_triton(reads=True),
    "a tensor that Triton writes": lambda: beside_triton(reads=False),
    "a tensor that AITER reads": beside_aiter,
    "causal=False in a verify": lambda: mla(causal=False),
    "a cap of 1.0": lambda: paged(logits_soft_cap=1.0),
    "True for one page": lambda: mla(page_size=True),
    "parents of another depth (0.5.23)": lambda: tree("sglang_jit", depth=2),
    "positions of a larger batch (0.5.23)": lambda: tree(
        "sglang_jit", positions=torch.zeros(16, dtype=torch.int64, device="cuda")
    ),
    "a mask for fewer drafts": lambda: tree("sgl_kernel", tree_mask=torch.zeros(16, dtype=torch.bool, device="cuda")),
    "other strides of values than of keys": lambda: paged(
        value_cache=torch.zeros(8, 1, 2, 16, device="cuda").bfloat16()[..., :8]
    ),
    "weights with another row stride than ids": route,
    "heads of 264": lambda: attention(size=264),
    "a strided float32 output of a norm": lambda: norm_into_columns("out"),
    # Kinds that the lines above do not have, at the call sites of serving code.
    "a slot at the end of the cache": lambda: store(4),
    "float16 keys in a bfloat16 cache": lambda: store(1, torch.float16),
    "a position beyond the cosines": lambda: rope(4),
    "cosines in float32": lambda: rope(dtype=torch.float32),
    "a grammar's mask of another vocabulary": lambda: STAND_INS["sgl_kernel.apply_token_bitmask_inplace_cuda"](
        columns(64, torch.float32), columns(1, torch.int32)
    ),
    "an activation as wide as its input": lambda: STAND_INS["sgl_kernel.silu_and_mul"](columns(8), columns(8)),
    "a projection with transposed weights": lambda: STAND_INS["aiter.tuned_gemm.tgemm.mm"](columns(8), columns(2)),
    "swapped weights of two norms": lambda: STAND_INS["aiter.ops.fused_qk_rmsnorm_group_quant.fused_qk_rmsnorm"](
        columns(8), columns(4), columns(8), columns(4)[0], 1e-5, columns(4), columns(8)[0], 1e-5, 0
    ),
    "FP8 of strided rows": lambda: STAND_INS["aiter.per_token_quant_hip"](columns(8)[:, ::2], quant_dtype=FP8),
    "an FP8 product of too few inputs": lambda: fp8_product("cuda", inputs=128),
    "a draw into a row too few": lambda: STAND_INS["aiter.ops.sample.greedy_sample"](ints(0), columns(8)),
    "a replay after a reset": graph_after_reset,
    "an operator of a graph on freed memory": lambda: freed_after_capture(lambda freed, out: out.copy_(freed)),
    "a kernel of a graph on freed memory": lambda: freed_after_capture(lambda *given: copy_kernel[(1,)](*given, 8)),
    "a capture in a capture": lambda: in_capture(begin_capture),
    "a query of an event in a capture": lambda: in_capture(lambda _: torch.cuda.Event().query()),
    "a reduction by maximum": lambda: nccl(op=2),
    "a reduction of more than the buffer": lambda: nccl(8),
    "a kernel that stores beyond its tensor": lambda: copy_kernel[(1,)](columns(8), torch.zeros(4).cuda().int(), 8),
    "a share in the place of another rank": lambda: scatter_in_place(1),
    "expert ids in int64": lambda: moe(1, dtype=torch.int64),
    "an expert of another rank": lambda: moe(4),
    "an expert map that is one off": lambda: moe(1, chosen=6),
    "a link beyond the drafts": lambda: verify(retrive_index=LINK_BEYOND),
    "an FP8 cache for BF16 queries": lambda: mla(kv_buffer=torch.zeros(16, 1, 1, 12).to(torch.float8_e4m3fnuz).cuda()),
    "no split of the keys": lambda: mla(num_kv_splits=0),
    "an output wider than the cache": lambda: mla(o=torch.zeros(8, 16, 16, device="cuda").bfloat16()),
    "heads that share no key head": lambda: attention(heads=3),
    "more experts of a token than there are": lambda: route(experts=1),
    "two tokens on a page of one": lambda: mla(kv_last_page_lens=ints(2, 2)),
    "a wait for an event that was never recorded": lambda: race(
        lambda x, side: (torch.cuda.current_stream().wait_event(torch.cuda.Event()), x.sum())
    ),
    # One for each rule that nothing above breaks.
    "a row short of the drafts": lambda: verify(predicts=ints(0, 0, 0)),
    "places of the step before": lambda: verify(accept_index=torch.zeros(1, 4, dtype=torch.int32, device="cuda")),
    "three drafts in links of four": lambda: tree("sgl_kernel", draft_token_num=3),
    "a draft too many (0.5.23)": lambda: tree("sglang_jit", selected_index=links(4)),
    "no branch (0.5.23)": lambda: tree("sglang_jit", topk=0, depth=1),
    "no depth (0.5.23)": lambda: tree("sglang_jit", parent_list=links(0), depth=0),
    "an unknown mode of the mask (0.5.23)": lambda: tree("sglang_jit", tree_mask_mode=3),
    "a position beyond the table": lambda: rotary(2),
    "a row of a verify that no request has": lambda: mla(q=heads(9, 16, 12), o=heads(9, 16, 8)),
    "bounds of a prefill that fall": lambda: mla(prefill=True, qo_indptr=ints(0, 9, 8)),
    "a prefill that is longer than it says": lambda: mla(prefill=True, max_seqlen_q=3),
    "values of 264": lambda: attention(v=heads(2, 2, 264)),
    "bounds of queries that fall": lambda: attention(cu_seqlens_q=ints(0, 3, 2), cu_seqlens_k=ints(0, 1, 2)),
    "bounds beyond the queries": lambda: attention(cu_seqlens_q=ints(0, 3)),
    "more queries than it says": lambda: attention(max_seqlen_q=1),
    "bounds of keys that fall": lambda: attention(cu_seqlens_q=ints(0, 1, 2), cu_seqlens_k=ints(0, 3, 2)),
    "bounds beyond the keys": lambda: attention(cu_seqlens_k=ints(0, 3)),
    "more keys than it says": lambda: attention(max_seqlen_k=1),
    "a prefill's table that is too short": lambda: prefill_over(1, 2),
    "a prefill's page beyond the cache": lambda: prefill_over(1, 2, 4),
    "one length of a last page for two queries": lambda: paged(kv_last_page_lens=ints(1)),
    "a strided float32 residual of a norm": lambda: norm_into_columns("residual_in"),
    "a strided float32 sum of a norm": lambda: norm_into_columns("residual_out"),
    "seeds on the host": lambda: drawn("cpu"),
    "seeds on another GPU": lambda: drawn("cuda:1"),
}


def noticed(fault: Callable[[], object]) -> str:
    try:
        fault()
    except Exception as error:
        return str(error)
    return "not noticed"


def scattered(rank: int, unique: ctypes.Structure) -> list[float]:
    """Return a rank's half of the sum over two ranks, by NCCL's library as SGLang's communicator calls it."""
    nccl, own = rccl.Gloo(), (torch.arange(4.0) * (rank + 1)).cuda()
    half, group = torch.zeros(2, device="cuda"), nccl.ncclCommInitRank(2, unique, rank)
    nccl.ncclReduceScatter(*(ctypes.c_void_p(one.data_ptr()) for one in (own, half)), 2, FLOAT32, 0, group, None)
    return half.tolist()


@torch.compile(dynamic=True)
def largest(x: torch.Tensor, more: int) -> torch.Tensor:
    return torch.max(x, -1).values + more


def compiled() -> list[float]:
    """Return results of a function that Dynamo compiles on side streams: its frames begin with the current stream."""
    results = []
    for rows in (40, 41):
        with torch.cuda.stream(torch.cuda.Stream()):
            result = largest(torch.ones(rows, 8, device="cuda"), rows)
        torch.cuda.synchronize()
        results.append(result[0].item())
    return results


def healthy() -> dict[str, object]:
    """Report what must work: the draw takes its Triton kernel, waits order streams, a graph replays on new input."""
    library.reset()
    probs = torch.rand(4, 640, generator=torch.Generator().manual_seed(1)).softmax(-1)
    chosen = torch.full((4,), 640, dtype=torch.int32), torch.ones(4), torch.zeros(4)
    seeds, positions = torch.arange(4), torch.arange(4) * 7
    on_host = draw(probs, Filters(*chosen), seeds, positions)
    tensors = (tensor.cuda() for tensor in (probs, *chosen, seeds, positions))
    probs_, top_k, top_p, min_p, seeds_, positions_ = tensors
    drawn = draw(probs_, Filters(top_k, top_p, min_p), seeds_, positions_)
    launches = sorted(name for name in library.report()["launch"] if name.startswith("triton"))
    verify(target_predict=drawn.view(1, 4))

    out = torch.zeros(2, 2, 8, device="cuda").bfloat16()
    attended = attention(out=out) is out and bool((out == 1).all())

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    summed = torch.ones(3, device="cuda")
    dist.all_reduce(summed)
    dist.broadcast(summed, src=0)
    with ThreadPoolExecutor(2) as pool:
        halves = list(pool.map(scattered, range(2), [rccl.Gloo().ncclGetUniqueId()] * 2))

    rows = torch.arange(1.0, 4001.0)[:, None]
    by_number, by_tensor = (rows.cuda() / 127).cpu(), (rows.cuda() / torch.full_like(rows, 127).cuda()).cpu()
    quotient = rows / 127
    divided = [
        torch.equal(*pair) for pair in ((by_number, rows * (1 / 127)), (by_number, quotient), (by_tensor, quotient))
    ]
    quantized = all(map(torch.equal, quantize_rows(rows), (part.cpu() for part in quantize_rows(rows.cuda()))))

    library.reset()
    x = torch.full((3,), 2.0, device="cuda")
    library.load().vg_capture_begin(7)
    y = (x * 3).sum()
    library.load().vg_capture_end()
    x.fill_(5.0)
    torch.ops.virtual_gpu.replay(7)
    replayed = y.item()
    library.load().vg_forget(7)

    library.reset()
    x.copy_(torch.ones(3))
    x.copy_(torch.ones(3).pin_memory(), non_blocking=True)
    x.add_(1).tolist()
    counted = library.report()
    with torch.cuda.device(2):
        inside = torch.ones(1, device="cuda")
    scatter_in_place(0)  # as NCCL allows
    moe(2, chosen=6)  # raises where the map is right, and the node says no
    return {
        "devices": [str(one.device) for one in (drawn, torch.ones(1, device="cuda:3"), inside, torch.ones(1).cuda())],
        "on a GPU": x.is_cuda,
        "draw": [drawn.tolist() == on_host.tolist(), str(drawn.dtype), launches],
        "after a wait": noticed(lambda: race(lambda x, side: (torch.cuda.current_stream().wait_stream(side), x.sum()))),
        "replayed": replayed,
        "attended into out": attended,
        "compiled": compiled(),
        "copied": copied(),
        "divided": divided,
        "quantized": quantized,
        "wrong of ours": wrong_of_ours(),
        "summed over ranks": [summed.tolist(), *halves],
        "counted": counted,
    }


print(json.dumps({"faults": {name: noticed(fault) for name, fault in FAULTS.items()}, "healthy": healthy()}))

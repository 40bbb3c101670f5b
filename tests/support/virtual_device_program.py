"""Check the virtual device in a process of its own, because it changes torch for good; print what happened as JSON.

Run by tests/laptop/test_virtual_device.py. Each fault maps to the message that names it, or to "not noticed".
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

from kimi_w4a8_eagle3.moe.reference import quantize_rows  # noqa: E402
from kimi_w4a8_eagle3.sampling.draw import Filters, draw  # noqa: E402
from kimi_w4a8_laptop.virtual import library, rccl  # noqa: E402

FLOAT32 = 7  # of nccl.h
LINKS = ("candidates", "retrive_index", "retrive_next_token", "retrive_next_sibling", "target_predict")


def verify(**changed: torch.Tensor | None) -> None:
    """Call verify_tree_greedy for one request with three drafts."""
    from sgl_kernel import verify_tree_greedy

    ints = {
        "predicts": torch.zeros(4, dtype=torch.int32, device="cuda"),
        "accept_index": torch.zeros(1, 4, dtype=torch.int32, device="cuda"),
        "accept_token_num": torch.zeros(1, dtype=torch.int32, device="cuda"),
    }
    links = {name: torch.zeros(1, 4, dtype=torch.int64, device="cuda") for name in LINKS}
    verify_tree_greedy(**{name: value for name, value in {**ints, **links, **changed}.items() if value is not None})


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
    """Run `first` on a side stream, then `second` on the default stream; raise what was noticed."""
    tensor, side = torch.zeros(4, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    before = library.report().get("race", {})
    with torch.cuda.stream(side):
        first(tensor)
    second(tensor, side)
    if new := library.report().get("race", {}).keys() - before.keys():
        raise RuntimeError(f"race: {min(new)}")


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


def greedy_sample_into_int64() -> None:
    from aiter import greedy_sample

    greedy_sample(torch.zeros(2, dtype=torch.int64, device="cuda"), torch.zeros(2, 8, device="cuda"))


def wide_pages() -> None:
    """Page indices in int64, as torch.arange makes them."""
    from aiter import paged_attention_ragged

    q, cache = torch.zeros(1, 2, 8, device="cuda").bfloat16(), torch.zeros(4, 1, 2, 8, device="cuda").bfloat16()
    one, bounds = torch.ones(1, device="cuda"), torch.tensor([0, 2], dtype=torch.int32, device="cuda")
    pages, last = torch.arange(2, device="cuda"), torch.ones(1, dtype=torch.int32, device="cuda")
    workspace = torch.zeros(64, dtype=torch.uint8, device="cuda")
    paged_attention_ragged(
        q.clone(), workspace, q, cache, cache, 1.0, bounds, pages, last, 1, 1, None, "auto", "NHD", 0.0, one, one
    )


def attention(**given: object) -> torch.Tensor:
    from aiter import flash_attn_varlen_func

    q, bounds = torch.ones(2, 2, 8, device="cuda").bfloat16(), torch.tensor([0, 2], dtype=torch.int32, device="cuda")
    found: torch.Tensor = flash_attn_varlen_func(q, q, q, bounds, bounds, 2, 2, causal=True, **given)
    return found


def on(device: str) -> torch.Tensor:
    return torch.zeros(1, 4, dtype=torch.int64, device=device)


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
    "greedy_sample into int64": greedy_sample_into_int64,
    "page indices in int64": wide_pages,
    "a window that no stand-in computes": lambda: attention(window_size=(128, 0)),
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
    counted.pop("race", None)
    return {
        "devices": [str(drawn.device), str(x.is_cuda), str(torch.ones(1, device="cuda:3").device)],
        "draw": [drawn.tolist() == on_host.tolist(), str(drawn.dtype), launches],
        "after a wait": noticed(lambda: race(lambda x, side: (torch.cuda.current_stream().wait_stream(side), x.sum()))),
        "replayed": replayed,
        "attended into out": attended,
        "divided": divided,
        "quantized": quantized,
        "summed over ranks": [summed.tolist(), *halves],
        "counted": counted,
    }


print(json.dumps({"faults": {name: noticed(fault) for name, fault in FAULTS.items()}, "healthy": healthy()}))

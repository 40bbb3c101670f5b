"""`python -m proof.on_gpu`: check the Triton kernels and the draft trainer on this machine's GPU, and time them.

Layers have the sizes of Kimi-K2.5, of which a rank has its share. With `--small` they are tiny, and without a GPU
Triton's interpreter runs them (TRITON_INTERPRET=1) and nothing is timed.

A time is the median of replays of a captured graph. Each replay runs several batches, so the weights of one are not in
the cache when their turn comes again. A floor is the larger of two times: the chosen experts' weights at the bandwidth
of a copy, and the products at the rate of torch's INT8 product, both measured on the same GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
import typer

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.cli import run
from kimi_w4a8_eagle3.moe.contract import MoeShape, QuarkMoeWeights
from kimi_w4a8_eagle3.moe.layer_check import layer_errors
from kimi_w4a8_eagle3.moe.triton.backend import TritonBackend
from kimi_w4a8_eagle3.quark.weight_format import INT4, MXFP4
from kimi_w4a8_eagle3.sampling import triton_draw, triton_penalties
from kimi_w4a8_eagle3.sampling.draw import draw_rows
from kimi_w4a8_eagle3.sampling.penalties import penalize
from kimi_w4a8_lab.draft.collected import Collected
from kimi_w4a8_lab.draft.eagle3 import Draft, DraftSizes
from kimi_w4a8_lab.draft.training import TrainingSettings, train
from kimi_w4a8_lab.kernels.agreement import agreements, batches
from kimi_w4a8_lab.kernels.random_layers import random_batch, random_layer

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
ALL = 1 << 30  # a top-k that keeps every token
FILTERS = {"none": (ALL, 1.0, 0.0), "top-p 0.95": (ALL, 0.95, 0.0), "top-k 20": (20, 1.0, 0.0), "all": (50, 0.9, 0.02)}
Rows = Iterator[tuple[object, ...]]


def milliseconds(*functions: Callable[[], object]) -> float:
    """Return the median time of one of the functions, which run one after another in a captured graph."""
    from triton.testing import do_bench_cudagraph  # needs a driver

    def together() -> None:
        for function in functions:
            function()

    return float(do_bench_cudagraph(together, rep=60, return_mode="median")) / len(functions)


def ceilings() -> tuple[float, float]:
    """Return this GPU's bandwidth in bytes/ms, of a copy, and its INT8 rate in operations/ms, of torch's product."""
    source, n = torch.empty(2**31, dtype=torch.uint8, device=DEVICE), 8192
    a, b = (torch.randint(-127, 127, (n, n), dtype=torch.int8, device=DEVICE) for _ in range(2))
    copy = milliseconds(partial(torch.empty_like(source).copy_, source))
    return 2 * source.numel() / copy, 2 * n**3 / milliseconds(partial(torch._int_mm, a, b.t()))


def checked(shapes: dict[str, MoeShape], small: bool) -> Rows:
    """Compare each batch size with known outputs bit for bit, and random numbers with the reference."""
    yield "layer", "batch sizes", "with known outputs bit for bit", "worst token of random numbers"
    for name, shape in shapes.items():
        sizes = [3] if small else batches("triton")
        found = list(agreements(TritonBackend(), shape, sizes, DEVICE))
        yield name, len(sizes), len(found), f"{max(one.worst for one in found):.2e} of its norm"


def loaded(shapes: dict[str, MoeShape], layers: int) -> Rows:
    """Try random layers as a server does while it loads them: some tokens of each expert."""
    yield "layer", "layers", "tokens", "further away than 0.2 % of their norm", "worst token", "worst expert"
    for name, shape in shapes.items():
        backend, found, layer = TritonBackend(), [], random_layer(shape, DEVICE)
        for seed in range(layers):
            for codes in (layer.w13, layer.w2):
                least, most = (0, 256) if codes.dtype == torch.uint8 else (-(2**31), 2**31 - 1)
                codes.random_(least, most, generator=torch.Generator(DEVICE).manual_seed(seed))
            found.append(layer_errors(backend, backend.prepare(layer), layer))
        away = torch.cat(found)
        yield name, layers, away.numel(), int((away > 2e-3).sum()), f"{away.max():.2%}", f"{away.amin(1).max():.2%}"


def timed(shapes: dict[str, MoeShape], tokens: tuple[int, ...]) -> Rows:
    """Time whole layers, beside the same layer in BF16 by torch's grouped products."""
    bandwidth, rate = ceilings()
    yield "layer", "tokens", "us", "floor us", "times the floor", "BF16 us", "BF16 / ours"
    for name, shape in shapes.items():
        layer = random_layer(shape, DEVICE)
        backend, other = TritonBackend(), Bf16Layer(shape)
        moe, weights = backend.prepare(layer), _bytes(layer)
        for count in tokens:
            drawn = [random_batch(shape, count + seed, DEVICE) for seed in range(8 if count < 64 else 2)]
            drawn = [tuple(part[:count].contiguous() for part in one) for one in drawn]  # type: ignore[misc]
            ours = milliseconds(*(partial(backend.forward, x, moe, router, ids) for x, router, ids in drawn))
            bf16 = milliseconds(*(partial(other.forward, *one) for one in drawn))
            experts = statistics.mean(ids.unique().numel() for _, _, ids in drawn)
            products = 6 * count * shape.top_k * shape.hidden * shape.inter
            floor = max(experts / shape.num_experts * weights / bandwidth, products / rate)
            us, ratios = (f"{1e3 * ms:.1f}" for ms in (ours, floor)), f"{ours / floor:.2f}"
            yield name, count, *us, ratios, f"{1e3 * bf16:.1f}", f"{bf16 / ours:.2f}"


class Bf16Layer:
    """A layer of random BF16 weights, as three grouped products of sorted tokens would compute it."""

    def __init__(self, shape: MoeShape) -> None:
        self.shape, sizes = shape, ((2 * shape.inter, shape.hidden), (shape.hidden, shape.inter))
        self.w13, self.w2 = (
            torch.randn(shape.num_experts, *size, device=DEVICE, dtype=torch.bfloat16) / 64 for size in sizes
        )

    def forward(self, x: torch.Tensor, router: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return bfloat16 [T, H]."""
        flat = ids.flatten().long()
        order = flat.argsort()
        ends = torch.zeros(self.shape.num_experts, dtype=torch.int32, device=DEVICE)
        ends = ends.index_add(0, flat, torch.ones_like(flat, dtype=torch.int32)).cumsum(0).int()
        tokens = order // self.shape.top_k
        gate, up = torch._grouped_mm(x[tokens], self.w13.transpose(1, 2), offs=ends).chunk(2, 1)
        rows = torch._grouped_mm(F.silu(gate) * up, self.w2.transpose(1, 2), offs=ends)
        return torch.zeros_like(x).index_add_(0, tokens, rows * router.flatten()[order, None].bfloat16())


def drawn(vocabulary: int, rows: tuple[int, ...]) -> Rows:
    """Compare each filter's draws with the definition in numpy, a row alone with the batch, and time the kernel."""
    yield "filter", "rows", "as defined", "alone as in the batch", "draw us", "softmax us", "sort and draw us"
    for name, filters in FILTERS.items():
        for count in rows:
            generator = torch.Generator().manual_seed(count)
            logits = (torch.randn(count, vocabulary, generator=generator) * 3).bfloat16().float().to(DEVICE)
            probs, at = logits.softmax(-1), torch.arange(count, device=DEVICE)
            kinds = (torch.int32, torch.float32, torch.float32)
            chosen = [torch.full((count,), v, dtype=t, device=DEVICE) for v, t in zip(filters, kinds, strict=True)]
            given = (probs, *chosen, at * 2**40 + 7, at * 70_000)
            launch = partial(triton_draw.launch, filtered=name != "none")
            found, alone = launch(*given), launch(*(part[-1:] for part in given))
            wanted = draw_rows(*(part[:40].cpu().numpy() for part in given))
            same = int((found[:40].cpu() == torch.from_numpy(wanted)).sum())
            others = partial(torch.softmax, logits, -1), partial(_sorted_draw, probs, *chosen)
            times = [f"{1e3 * milliseconds(one):.0f}" for one in (partial(launch, *given), *others) if GPU]
            yield name, count, f"{same} of {len(wanted)}", bool(alone[0] == found[-1]), *times


def _sorted_draw(p: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Sort, filter and draw with torch's operators, as SGLang does on ROCm."""
    ordered, index = p.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    place = torch.arange(p.shape[1], device=p.device)
    dropped = (place >= top_k[:, None]) | (before > top_p[:, None]) | (ordered < ordered[:, :1] * min_p[:, None])
    noise = torch.empty_like(ordered).exponential_()
    return index.gather(1, (ordered.masked_fill(dropped, 0.0) / noise).argmax(-1, keepdim=True))[:, 0]


def penalized(vocabulary: int, requests: tuple[int, ...]) -> Rows:
    """Compare penalties at four positions of each request with the definition in torch, and time both."""
    yield "penalized requests", "equal bit for bit", "kernel us", "torch us"
    for count in requests:
        generator = torch.Generator(DEVICE).manual_seed(count)
        draws = partial(torch.randint, generator=generator, device=DEVICE)
        logits = torch.randn(4 * count, vocabulary, generator=generator, device=DEVICE) * 3
        rows, weights = torch.arange(count, device=DEVICE).flip(0), torch.tensor([[0.7, 0.3, 1.3]], device=DEVICE)
        given = (
            4,
            rows,
            draws(0, 3, (count, vocabulary)).int(),
            rows,
            weights.repeat(count, 1),
            draws(0, vocabulary, (count, 4)),
        )
        one, other = logits.clone(), logits.clone()
        penalize(one, *given)
        triton_penalties.launch(other, *given)
        both = (partial(triton_penalties.launch, other, *given), partial(penalize, one, *given))
        same = torch.equal(one, other)
        yield count, same, *(f"{1e3 * milliseconds(call):.1f}" for call in both if GPU)


def trained(sizes: DraftSizes, vocabulary: int, requests: int, length: int) -> Rows:
    """Train a draft of random weights on random states for four batches; tell its memory and its rate."""
    yield "tokens a batch", "guessed", "GiB before", "GiB at most", "tokens/s", "loss"
    with DEVICE:
        draft, embedding = Draft(sizes, vocabulary), torch.randn(vocabulary, sizes.hidden, dtype=torch.bfloat16)
    half = ((length // 2, length),)
    rows = [Collected("key", tuple(range(at, at + length)), half, at) for at in range(requests)]
    states = torch.randn(requests, length, len(sizes.captured) * sizes.target_hidden).bfloat16()
    ends, losses = [time.perf_counter()], []

    def report(step: int, values: dict[str, float]) -> None:
        ends.append(time.perf_counter())
        losses.append(f"{values['loss']:.2f}")

    if GPU:
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if GPU else 0
    settings = TrainingSettings(epochs=4, batch=requests, keep=1.0, lr=1e-4)
    train(draft, rows, lambda chosen: states[: len(chosen)], embedding, settings, report)
    most = torch.cuda.max_memory_allocated() if GPU else 0
    rate = requests * length / min(after - before for before, after in pairwise(ends[1:]))
    guessed = sum(sum(row.guessed) for row in rows)
    sizes_gib = (f"{size / 2**30:.1f}" for size in (held, most))
    yield requests * length, guessed, *sizes_gib, f"{rate:.0f}", " ".join(losses)


def _bytes(layer: QuarkMoeWeights) -> int:
    """Return the bytes of a layer's weights and their blocks' shifts."""
    parts = (layer.w13, layer.w2, layer.shift13, layer.shift2)
    return sum(part.numel() * part.element_size() for part in parts if part is not None)


def main(small: bool = typer.Option(False, "--small", help="Tiny shapes in Triton's interpreter.")) -> None:
    """Check and time everything, and print a table of each part as soon as it is done."""
    if not (GPU or small):
        raise KimiError(
            "this machine has no GPU", expected="a GPU that torch sees", remedy="--small, TRITON_INTERPRET=1"
        )
    shapes = {"INT4, TP 8": MoeShape(384, 7168, 256, 8), "INT4, TP 4": MoeShape(384, 7168, 512, 8)}
    shapes |= {"MXFP4, TP 8": MoeShape(384, 7168, 256, 8, weights=MXFP4)}
    sizes, vocabulary = DraftSizes(7168, 7168, 12_288, 0, (2, 30, 58), 1e-5, 64, 64, 128, 50_000.0), 163_840
    if small:
        shapes = {one.name: MoeShape(5, 192, 64, 3, weights=one) for one in (INT4, MXFP4)}
        sizes, vocabulary = DraftSizes(64, 64, 128, 0, (0, 1, 2), 1e-5, 2, 2, 32, 1e4), 640
    parts: dict[str, Rows] = {"The MoE layer against the contract": checked(shapes, small)}
    parts["A layer's check while it loads"] = loaded(shapes, 1 if small else 8)
    if GPU and not small:
        parts["The MoE layer's time"] = timed(shapes, (1, 8, 40, 160, 512, 1024, 10_240))
    parts["The draw"] = drawn(vocabulary, (2,) if small else (2, 8, 160))
    parts["Penalties"] = penalized(vocabulary, (1,) if small else (1, 40))
    parts["Training a draft"] = trained(sizes, vocabulary, 4, 16 if small else 512)
    device = torch.cuda.get_device_name() if GPU else "Triton's interpreter on a CPU"
    print(f"{device}, torch {torch.__version__}", flush=True)
    for title, table in parts.items():
        print(f"\n{title}\n", flush=True)
        for number, cells in enumerate(table):
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
            if not number:
                print("|" + "---|" * len(cells), flush=True)


if __name__ == "__main__":
    run(partial(typer.run, main))

"""A token's bits are the same alone and in a batch, for every operator that the CPU path replaces."""

import functools
import subprocess
import sys

import pytest
import torch
from support.cpu_attention import decode, extend

from kimi_w4a8_eagle3.moe.contract import MoeShape, QuarkMoeWeights
from kimi_w4a8_eagle3.moe.reference import ReferenceBackend
from kimi_w4a8_laptop.cpu import batch_invariant as invariant

BATCHES = (2, 3, 7, 8, 15, 17, 40, 300)
ROWS = 20


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rows_alone_and_in_batches_agree(operator, rows: torch.Tensor) -> None:
    alone = torch.cat([operator(row.unsqueeze(0)) for row in rows[:ROWS]])
    for batch in BATCHES:
        assert torch.equal(operator(rows[:batch])[:ROWS], alone[:batch]), f"{batch} rows"
        shifted = operator(rows[3 : 3 + batch])[: ROWS - 3]
        assert torch.equal(shifted, alone[3 : 3 + batch]), f"{batch} rows, each at another place"


@pytest.mark.parametrize("keeps_order", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("k", "n"), [(16, 32), (32, 64), (64, 192), (128, 16), (128, 640), (256, 128), (384, 128)])
def test_matrix_products(k, n, dtype, keeps_order, monkeypatch):
    """The sizes of the built-in model: projections, router, vocabulary, absorbed heads, the draft's first layer.

    The second half of every sum takes back the first: all that is left is rounding, which shows the order.
    """
    if keeps_order and not invariant.bf16_keeps_order():
        pytest.skip("this CPU has no BF16 instructions")
    monkeypatch.setattr(invariant, "bf16_keeps_order", lambda: keeps_order)
    half = normal(max(BATCHES) + 3, k // 2, dtype=dtype)
    rows, weight = torch.cat([half, -half], 1), normal(k // 2, n, dtype=dtype).repeat(2, 1)
    bias = normal(n, dtype=dtype)
    for layout in (weight, weight.T.contiguous().T):
        assert_rows_alone_and_in_batches_agree(functools.partial(one_matrix, layout), rows)
        assert_rows_alone_and_in_batches_agree(functools.partial(four_heads, layout), rows)
    assert_rows_alone_and_in_batches_agree(lambda x: invariant.addmm(bias, x, weight), rows)
    rows, weight = normal(ROWS, k, dtype=dtype), normal(k, n, dtype=dtype)
    exact = rows.double() @ weight.double()
    # float32 sums of k products, and BF16's one rounding.
    atol = k * 2**-24 * float((rows.double().abs() @ weight.double().abs()).max())
    torch.testing.assert_close(invariant.mm(rows, weight).double(), exact, rtol=2**-8, atol=atol)


def one_matrix(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return invariant.mm(x, weight)


def four_heads(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return invariant.bmm(x.expand(4, -1, -1), weight.expand(4, -1, -1)).transpose(0, 1).flatten(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["sigmoid", "silu"])
def test_functions(name, dtype):
    ours, torchs = getattr(invariant, name), getattr(torch.nn.functional, name)
    for width in (16, 24, 64):  # torch's own differ where 16 or 24 columns leave half a vector over
        rows = normal(max(BATCHES) + 3, width, dtype=dtype) * 8
        assert_rows_alone_and_in_batches_agree(ours, rows)
        tolerance = {torch.bfloat16: 2**-8, torch.float32: 2**-21}[dtype]
        torch.testing.assert_close(ours(rows), torchs(rows), rtol=tolerance, atol=1e-30)


def test_mixture_of_experts():
    shape = MoeShape(num_experts=16, hidden=128, inter=24, top_k=4)
    words = [torch.randint(-(2**31), 2**31, size, dtype=torch.int32) for size in ((16, 48, 16), (16, 128, 3))]
    scales = [torch.rand(16, n) * 0.01 for n in (48, 128)]
    backend = ReferenceBackend()
    moe = backend.prepare(QuarkMoeWeights(shape, *words, *scales))
    rows = normal(max(BATCHES) + 3, 128)
    score, chosen = torch.rand(len(rows), 16).topk(4)

    def layer(index: torch.Tensor) -> torch.Tensor:
        index = index.squeeze(1).long()
        return backend.forward(rows[index], moe, score[index], chosen[index].int())

    assert_rows_alone_and_in_batches_agree(layer, torch.arange(len(rows)).unsqueeze(1))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, spans: list[tuple[int, int]]):
    """Outputs of the spans (first, end) of each request's queries, as one batch; q [requests, length, H, D]."""
    new = torch.tensor([end - first for first, end in spans])
    packed = torch.cat([q[r, first:end] for r, (first, end) in enumerate(spans)])
    out = torch.empty(*packed.shape[:2], v.shape[-1])
    ends = torch.tensor([end for _, end in spans])
    extend(packed, None, None, k, v, table, torch.arange(len(spans)), ends, new, out, scale=0.1)
    return out.split(new.tolist())


@pytest.mark.parametrize(("heads", "groups", "latent"), [(4, 1, True), (4, 2, False)])
def test_attention_in_chunks_verified_and_decoded(heads, groups, latent):
    """A prompt of 300 tokens in one piece, in chunks around block borders, four and one at a time, beside others."""
    length, others = 300, [(250, 254), (0, 129), (17, 18), (699, 700)]
    pool = 1024
    k = normal(pool, groups, 96 if latent else 64)
    v = k[..., :64] if latent else normal(pool, groups, 64, seed=1)
    table = torch.stack([torch.randperm(pool, generator=torch.Generator().manual_seed(r)) for r in range(5)]).int()
    q = normal(5, 700, heads, k.shape[-1], seed=2)
    (whole,) = attend(q, k, v, table, [(0, length)])
    starts = {1: (0, 1, 126, 127, 128, 129, 255, 299), 4: (0, 125, 254), 127: (0, 127), 128: (0, 128), 129: (0, 129)}
    for step, firsts in starts.items():
        for first in firsts:
            span = (first, min(first + step, length))
            for among in ([], others):
                found = attend(q, k, v, table, [span, *among])[0]
                assert torch.equal(found, whole[slice(*span)]), f"{span} beside {among}"
    for number in (3, 40):  # decoded, the others at lengths of their own
        lengths = torch.arange(number) * 11 + length
        rows = table[torch.zeros(number, dtype=torch.long)]
        last = q[0, length - 1].expand(number, -1, -1)
        out = decode(last, k, v, rows, torch.arange(number), lengths, scale=0.1)
        assert torch.equal(out[0], whole[-1])


def test_what_a_model_calls_is_replaced():
    """This runs in its own process, because it replaces torch's operators for good."""
    script = """
import torch
from kimi_w4a8_laptop.cpu import batch_invariant as invariant
invariant.register()
seen = []
product = invariant.product
invariant.product = lambda a, b: (seen.append(a.shape), product(a, b))[1]
x, w = torch.randn(3, 32).bfloat16(), torch.randn(8, 32).bfloat16()
with torch.inference_mode():
    torch.nn.functional.linear(x, w)
    torch.nn.functional.linear(x, w, torch.randn(8).bfloat16())
    x @ w.T
    out = torch.empty(3, 2, 8, dtype=torch.bfloat16)
    torch.bmm(x.expand(2, 3, 32), w.T.expand(2, 32, 8), out=out.transpose(0, 1))
    assert torch.equal(out[:, 1], x @ w.T)
    assert torch.equal(torch.sigmoid(x), invariant.sigmoid(x)) and x.sigmoid().dtype == x.dtype
assert len(seen) == 5, seen
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

"""What a real compiler emits: Triton kernels compiled for gfx942, executed, and compared with NumPy.

The kernels are chosen for their instructions, not for use: integer and bit arithmetic, divisions, conversions,
reductions and scans (DPP and LDS), sorting, gathers with masks, atomics, matrix products.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from proof.gfx942 import Buffer, LaunchResult, Machine, Memory, parse_kernel
from proof.gfx942.numeric import bf16_to_f32, f32_to_bf16

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
pytestmark = pytest.mark.kernels

RNG = np.random.default_rng(5)
KINDS = {
    "float32": "*fp32",
    "int32": "*i32",
    "uint32": "*u32",
    "int8": "*i8",
    "uint16": "*bf16",
    "float16": "*fp16",
    "int64": "*i64",
}


def run(
    kernel, arrays, constants, *, scalars=None, grid=1, warps=4, order="lockstep"
) -> tuple[list[np.ndarray], LaunchResult]:
    """Compile for gfx942 and execute; `arrays` are arguments in order, None dtype-shaped tuples are fresh results."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    memory = Memory()
    buffers: list[Buffer] = [
        memory.empty(*a, "result") if isinstance(a, tuple) else memory.add(a, "input") for a in arrays
    ]
    names = kernel.arg_names
    scalars = scalars or {}
    signature = {n: KINDS[str(b.dtype)] for n, b in zip(names, buffers, strict=False)}
    signature |= dict.fromkeys(scalars, "i32") | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(
        source, target=GPUTarget("hip", "gfx942", 64), options={"num_warps": warps, "enable_fp_fusion": False}
    )
    code = parse_kernel(compiled.asm["amdgcn"])
    arguments = [*buffers, *scalars.values()]
    arguments += [0] * (len(code.args) - len(arguments))  # Triton's scratch pointers
    result = Machine(memory).launch(
        code,
        (grid, 1, 1),
        (64 * warps, 1, 1),
        arguments,
        order=order,
        lds_bytes=compiled.metadata.shared,
        redundant_writes=True,
    )
    return [memory.read(b) for b in buffers], result


@triton.jit
def integer_zoo(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(a_ptr + i)
    b = tl.load(b_ptr + i)
    u = a.to(tl.uint32)
    w = a.to(tl.int64) * b
    tl.store(out_ptr + i, a + b)
    tl.store(out_ptr + N + i, a * b)
    tl.store(out_ptr + 2 * N + i, a // b)
    tl.store(out_ptr + 3 * N + i, a % b)
    tl.store(out_ptr + 4 * N + i, (a ^ b) | (a & 0x55))
    tl.store(out_ptr + 5 * N + i, (u >> 5).to(tl.int32))
    tl.store(out_ptr + 6 * N + i, a >> 3)
    tl.store(out_ptr + 7 * N + i, tl.minimum(a, b))
    tl.store(out_ptr + 8 * N + i, tl.where(a > b, a, -b))
    tl.store(out_ptr + 9 * N + i, tl.umulhi(u, b.to(tl.uint32)).to(tl.int32))
    tl.store(out_ptr + 10 * N + i, (w >> 13).to(tl.int32))
    tl.store(out_ptr + 11 * N + i, a.to(tl.int8).to(tl.int32))
    tl.store(out_ptr + 12 * N + i, tl.abs(a))


def test_integer_arithmetic():
    n = 256
    a, b = (RNG.integers(-(2**31), 2**31, n).astype(np.int32) for _ in range(2))
    b = (b >> RNG.integers(0, 28, n).astype(np.int32)) | 1
    (_, _, out), _ = run(integer_zoo, [a, b, ((13, n), np.int32)], {"N": n})
    wide = a.astype(np.int64) * b
    quotient = np.fix(a.astype(np.float64) / b).astype(np.int64)
    high = (a.view(np.uint32).astype(object) * b.view(np.uint32).astype(object)) // 2**32
    expected = [
        *(a + b, a * b, quotient, a - quotient * b, (a ^ b) | (a & 0x55), a.view(np.uint32) >> 5, a >> 3),
        *(np.minimum(a, b), np.where(a > b, a, -b), high.astype(np.uint32), wide >> 13, a.astype(np.int8), np.abs(a)),
    ]
    for row, (got, want) in enumerate(zip(out, expected, strict=True)):
        assert (got == want.astype(np.int64).astype(np.int32)).all(), row


@triton.jit
def float_zoo(a_ptr, b_ptr, out_ptr, half_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(a_ptr + i)
    b = tl.load(b_ptr + i)
    tl.store(out_ptr + i, a / b)
    tl.store(out_ptr + N + i, tl.exp(a))
    tl.store(out_ptr + 2 * N + i, tl.log(tl.abs(a)))
    tl.store(out_ptr + 3 * N + i, tl.sqrt(tl.abs(a)))
    tl.store(out_ptr + 4 * N + i, tl.sigmoid(a) * b)
    tl.store(out_ptr + 5 * N + i, tl.floor(a) + tl.ceil(b))
    tl.store(out_ptr + 6 * N + i, tl.maximum(a, b) - tl.minimum(a, 0.5))
    tl.store(out_ptr + 7 * N + i, a.to(tl.int32).to(tl.float32))
    tl.store(out_ptr + 8 * N + i, tl.fma(a, b, a))
    tl.store(out_ptr + 9 * N + i, tl.div_rn(a, b))
    tl.store(out_ptr + 10 * N + i, tl.sqrt_rn(tl.abs(b)))
    tl.store(half_ptr + i, a.to(tl.bfloat16))
    tl.store(half_ptr + N + i, (a.to(tl.bfloat16) * b.to(tl.bfloat16)))
    tl.store(half_ptr + 2 * N + i, (a.to(tl.float16) + b.to(tl.float16)).to(tl.float32).to(tl.bfloat16))


def test_float_arithmetic():
    n = 512
    a, b = (RNG.normal(size=n).astype(np.float32) * 8 for _ in range(2))
    (_, _, out, half), _ = run(float_zoo, [a, b, ((11, n), np.float32), ((3, n), np.uint16)], {"N": n})
    x = a.astype(np.float64)
    exact = {5: np.floor(a) + np.ceil(b), 6: np.maximum(a, b) - np.minimum(a, np.float32(0.5)), 7: np.trunc(a)}
    exact |= {8: (x * b + x).astype(np.float32), 9: a / b, 10: np.sqrt(np.abs(b))}
    for row, want in exact.items():
        assert (out[row] == want).all(), row
    close = {0: x / b, 1: np.exp(x), 2: np.log(np.abs(x)), 3: np.sqrt(np.abs(x)), 4: b / (1 + np.exp(-x))}
    for row, want in close.items():
        assert np.allclose(out[row], want, rtol=1e-5, atol=1e-7), row
    rounded = bf16_to_f32(f32_to_bf16(a)), bf16_to_f32(f32_to_bf16(b))
    assert (half[0] == f32_to_bf16(a)).all()
    assert (half[1] == f32_to_bf16(rounded[0] * rounded[1])).all()
    assert (half[2] == f32_to_bf16((a.astype(np.float16) + b.astype(np.float16)).astype(np.float32))).all()


@triton.jit
def reductions(x_ptr, out_ptr, scan_ptr, M: tl.constexpr, N: tl.constexpr):
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    x = tl.load(x_ptr + m[:, None] * N + n[None, :])
    tl.store(out_ptr + m, tl.sum(x, 1))
    tl.store(out_ptr + M + m, tl.max(x, 1))
    tl.store(out_ptr + 2 * M + m, tl.argmin(x, 1))
    tl.store(out_ptr + 3 * M + m, tl.xor_sum(x, 1))
    tl.store(out_ptr + 4 * M + n, tl.sum(x, 0))
    tl.store(scan_ptr + m[:, None] * N + n[None, :], tl.cumsum(x, 1))
    tl.store(scan_ptr + M * N + m[:, None] * N + n[None, :], tl.sort(x, dim=1))


@pytest.mark.parametrize("order", ["lockstep", "reverse", random.Random(1)])
@pytest.mark.parametrize(("m", "n"), [(4, 256), (64, 16)])
def test_reductions_scans_and_sorts(m, n, order):
    x = RNG.integers(-1000, 1000, (m, n)).astype(np.int32)
    (_, out, scan), _ = run(
        reductions, [x, ((4 * m + n,), np.int32), ((2, m, n), np.int32)], {"M": m, "N": n}, order=order
    )
    rows = out[: 4 * m].reshape(4, m)
    assert (rows == [x.sum(1), x.max(1), x.argmin(1), np.bitwise_xor.reduce(x, 1)]).all()
    assert (out[4 * m :] == x.sum(0)).all()
    assert (scan[0] == x.cumsum(1)).all() and (scan[1] == np.sort(x, 1)).all()


@triton.jit
def scatter(
    index_ptr, value_ptr, counts_ptr, sums_ptr, old_ptr, histogram_ptr, count, N: tl.constexpr, BINS: tl.constexpr
):
    i = tl.program_id(0) * N + tl.arange(0, N)
    valid = i < count
    index = tl.load(index_ptr + i, mask=valid, other=0)
    value = tl.load(value_ptr + i, mask=valid, other=0.0)
    old = tl.atomic_add(counts_ptr + index, 1, mask=valid)
    tl.atomic_add(sums_ptr + index, value, mask=valid)
    tl.atomic_max(counts_ptr + BINS + index, i, mask=valid)
    tl.store(old_ptr + i, old, mask=valid)
    bins = tl.histogram(index, BINS, mask=valid)
    tl.store(histogram_ptr + tl.program_id(0) * BINS + tl.arange(0, BINS), bins)


def test_atomics_and_histogram():
    count, n, bins = 700, 256, 16
    index = RNG.integers(0, bins, count).astype(np.int32)
    value = RNG.integers(-9, 9, count).astype(np.float32)
    grid = -(-count // n)
    arrays = [index, value, np.zeros((2, bins), np.int32), np.zeros(bins, np.float32)]
    (_, _, counts, sums, old, histogram), _ = run(
        scatter,
        [*arrays, ((count,), np.int32), ((grid, bins), np.int32)],
        {"N": n, "BINS": bins},
        scalars={"count": count},
        grid=grid,
    )
    expected = np.bincount(index, minlength=bins)
    assert (counts[0] == expected).all() and (sums == np.bincount(index, value, bins)).all()
    assert (counts[1] == [np.flatnonzero(index == b).max() for b in range(bins)]).all()
    for b in range(bins):  # each addition saw a different count
        assert sorted(old[index == b]) == list(range(expected[b]))
    assert (histogram.sum(0) == expected).all()


@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.arange(0, BN)
    k = tl.arange(0, BK)
    total = tl.zeros((BM, BN), KIND)
    for start in range(0, K, BK):
        a = tl.load(a_ptr + m[:, None] * K + (start + k)[None, :], (m[:, None] < M) & ((start + k)[None, :] < K), 0.0)
        b = tl.load(b_ptr + n[None, :] * K + (start + k)[:, None], (n[None, :] < N) & ((start + k)[:, None] < K), 0.0)
        total = tl.dot(a, b, total)
    tl.store(c_ptr + m[:, None] * N + n[None, :], total, (m[:, None] < M) & (n[None, :] < N))


@pytest.mark.parametrize("order", ["lockstep", "forward", random.Random(2)])
@pytest.mark.parametrize("kind", ["int8", "bfloat16", "float16"])
def test_matrix_product_with_ragged_edges(kind, order):
    rows, columns, depth, tile = 37, 50, 90, (32, 64, 64)
    values = [RNG.integers(-128, 128, (n, depth)).astype(np.int8) for n in (rows, columns)]
    exact = values[0].astype(np.int32) @ values[1].astype(np.int32).T
    encode = {"int8": lambda x: x, "float16": lambda x: x.astype(np.float16)}
    encode["bfloat16"] = lambda x: f32_to_bf16(x.astype(np.float32))
    given = [encode[kind](v) for v in values]
    dtype = np.int32 if kind == "int8" else np.float32
    (_, _, c), result = run(
        matmul,
        [*given, ((rows, columns), dtype)],
        {**dict(zip(("BM", "BN", "BK"), tile, strict=True)), "KIND": tl.int32 if kind == "int8" else tl.float32},
        scalars={"M": rows, "N": columns, "K": depth},
        grid=2,
        order=order,
    )
    assert (c == exact).all()  # also in float: all sums are integers below 2**24
    assert any(op.startswith("v_mfma") for op in result.counts)

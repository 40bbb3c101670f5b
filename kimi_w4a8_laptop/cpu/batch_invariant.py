"""Replacements for torch's CPU operators whose result for one token depends on the other tokens of its batch.

Three things make a token's bits depend on its neighbours:

- A matrix product with few rows uses another kernel, with another order of summation. From some number of rows on, the
  order depends only on the length of the sums, so shorter inputs are padded with zeros: to 16 rows in float32, and in
  BF16 until torch uses oneDNN. On CPUs without BF16 instructions oneDNN's BF16 still depends on the rows, which
  `bf16_keeps_order` measures; BF16 is then multiplied in float32 and rounded once, at the end.
- Vectorised functions compute the elements that do not fill a vector with another formula. `exp` is the same in both,
  and so are +, * and /, which are rounded correctly.
- A prompt is prefilled over its own keys but continued over cached latents. `absorbed` always uses the latents.

Engines on a CPU always use them. `tests/laptop/test_cpu_batch_invariant.py` compares single rows with batches, and
`eval lossless --exact` compares whole answers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from kimi_w4a8_eagle3.moe import reference

TARGET = "sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry.get_handler"
ROWS = 16  # from this number of rows on, BLAS uses one float32 kernel
ONEDNN = 4096  # a BF16 product with more multiplications than this uses oneDNN
_library: torch.library.Library | None = None


def register() -> None:
    """Replace the operators for CPU tensors in this process and in its forks."""
    global _library
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # about the override below
        for function in (mm, addmm, bmm, bmm_out, sigmoid, silu):
            _library.impl(function.__name__.replace("_out", ".out"), function, "CPU", allow_override=True)


def padded(x: torch.Tensor, rows: int = ROWS) -> torch.Tensor:
    """Pad `x` [..., M, K] with zero rows below, up to `rows` rows."""
    missing = rows - x.shape[-2]
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing > 0 else x


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply a [M, K] by b [K, N], or [B, M, K] by [B, K, N]; BF16 that cannot keep its order returns float32."""
    rows, needed = a.shape[-2], 0
    if a.dtype == torch.bfloat16 and bf16_keeps_order():
        needed = ONEDNN // max(1, b.shape[-2] * b.shape[-1]) + 1
    elif a.dtype in (torch.bfloat16, torch.float32):
        a, b, needed = a.float(), b.float(), ROWS
    out = unreplaced(padded(a, needed), b)
    return out if rows >= needed else out[..., :rows, :]


@cache
def bf16_keeps_order() -> bool:
    """Return True if a BF16 row has the same bits alone and among others on this CPU.

    The second half of every sum cancels the first. Only rounding is left, and rounding changes with the order.
    """
    seed = torch.Generator().manual_seed(0)
    x, w = torch.randn(40, 192, generator=seed), torch.randn(192, 640, generator=seed)
    x, w = torch.cat([x, -x], 1).bfloat16(), torch.cat([w, w]).bfloat16()
    whole = unreplaced(x, w)
    return all(torch.equal(unreplaced(x[:n], w), whole[:n]) for n in (1, 2, 4, 8, 17))


@cache
def batched_rows(k: int, transposed: bool) -> int:
    """Return the number of rows, at most `ROWS`, from which batched float32 sums of `k` keep their order on this CPU.

    transposed: the second factor is a transposed view. Attention has few rows, in a decode step of the draft two.
    """
    seed = torch.Generator().manual_seed(0)
    x, w = (torch.randn(2, *shape, generator=seed) for shape in ((3 * ROWS, k // 2), (k // 2, 65)))
    x, w = torch.cat([x, -x], -1), torch.cat([w, w], 1)
    if transposed:
        w = w.transpose(1, 2).contiguous().transpose(1, 2)
    whole = unreplaced(x, w)
    alike = [torch.equal(unreplaced(x[:, :rows], w), whole[:, :rows]) for rows in range(1, ROWS)]
    return max([1, *(rows + 1 for rows, same in enumerate(alike, 1) if not same)])


def unreplaced(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply with torch's own kernels: `mm.out` and `baddbmm` are not replaced. beta=0 ignores the first input."""
    if a.dim() == 2:
        return torch.mm(a, b, out=a.new_empty(a.shape[0], b.shape[1]))
    return torch.baddbmm(a.new_empty(1, 1, 1), a, b, beta=0)


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """aten::mm: [M, K] x [K, N]."""
    return product(a, b).to(a.dtype)


def addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    """aten::addmm: the product is rounded to its dtype before the bias is added."""
    return bias * beta + mm(a, b) * alpha


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """aten::bmm: [B, M, K] x [B, K, N]."""
    return product(a, b).to(a.dtype)


def bmm_out(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """aten::bmm.out, for an `out` of the right shape."""
    return out.copy_(product(a, b))


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """aten::sigmoid, for floating-point `x`."""
    return torch.reciprocal(1 + torch.exp(-x.float())).to(x.dtype)


def silu(x: torch.Tensor) -> torch.Tensor:
    """aten::silu."""
    return reference.silu(x.float()).to(x.dtype)


def get_handler(original: Callable[..., Any], cls: type, backend_name: str) -> Callable[..., Any]:
    """AROUND hook of `AttentionBackendRegistry.get_handler`: return `absorbed` for the CPU's backend."""
    return absorbed if backend_name == "intel_amx" else original(cls, backend_name)


def absorbed(attention: Any, forward_batch: Any) -> Any:
    """Choose MLA over the latents for prefill, decode and verification, never over a prompt's own keys."""
    # SGLang's import order: it imports the model modules
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return AttnForwardMethod.MLA

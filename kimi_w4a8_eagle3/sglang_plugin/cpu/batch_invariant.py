"""torch's CPU operators whose result for one token depends on the others in its batch, replaced by ones that do not.

Three things make a token's bits depend on its neighbours:

- A matrix product takes another kernel, with another order of summation, when it has few rows. From a number of rows
  on, the order depends on the number of products alone, so zeros are added below that: in float32 16 rows, in BF16 as
  many as make torch use oneDNN. Where oneDNN's BF16 depends on the rows all the same (CPUs without BF16 instructions),
  which `bf16_keeps_order` measures, BF16 is multiplied in float32 and rounded once, at the end.
- Vectorised functions compute the elements that fill no vector with another formula. `exp` is the same for both, and
  so are +, * and /, which are rounded correctly.
- A prompt is prefilled over its own keys but continued over cached latents: `absorbed` always takes the latents.

An engine on a CPU has them always; docs/eval.md says what they cost.
`tests/sglang_plugin/test_cpu_batch_invariant.py` compares single rows with batches; `eval lossless --exact`, whole
answers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ...moe import reference

TARGET = "sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry.get_handler"
ROWS = 16  # from here on BLAS uses one float32 kernel, whatever the number of rows
ONEDNN = 4096  # a BF16 product of more multiplications than this goes to oneDNN
_library: torch.library.Library | None = None


def register() -> None:
    """Replace the operators for CPU tensors in this process and in its forks."""
    global _library
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # that one is overridden
        for function in (mm, addmm, bmm, bmm_out, sigmoid, silu):
            _library.impl(function.__name__.replace("_out", ".out"), function, "CPU", allow_override=True)


def padded(x: torch.Tensor, rows: int = ROWS) -> torch.Tensor:
    """`x` [..., M, K] with at least `rows` rows: zeros below."""
    missing = rows - x.shape[-2]
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing > 0 else x


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] times b [K, N], or [B, M, K] times [B, K, N]; float32 for float32 and for BF16 out of order."""
    rows, needed = a.shape[-2], 0
    if a.dtype == torch.bfloat16 and bf16_keeps_order():
        needed = ONEDNN // max(1, b.shape[-2] * b.shape[-1]) + 1
    elif a.dtype in (torch.bfloat16, torch.float32):
        a, b, needed = a.float(), b.float(), ROWS
    out = unreplaced(padded(a, needed), b)
    return out if rows >= needed else out[..., :rows, :]


@cache
def bf16_keeps_order() -> bool:
    """Whether BF16 rows have the same bits alone and among others, on this CPU.

    The second half of every sum takes back the first: what is left is rounding, and changes with the order.
    """
    seed = torch.Generator().manual_seed(0)
    x, w = torch.randn(40, 192, generator=seed), torch.randn(192, 640, generator=seed)
    x, w = torch.cat([x, -x], 1).bfloat16(), torch.cat([w, w]).bfloat16()
    whole = unreplaced(x, w)
    return all(torch.equal(unreplaced(x[:n], w), whole[:n]) for n in (1, 2, 4, 8, 17))


@cache
def batched_rows() -> int:
    """From how many rows on, `ROWS` at most, a batched float32 product keeps its order on this CPU.

    For attention, which has few rows a request: a decode step of the built-in model has 4, and its draft's 2.
    """
    seed = torch.Generator().manual_seed(0)
    needed = 1
    for k, n in ((48, 256), (64, 65)):  # the built-in model's scores, and its sums over a block of keys
        x, w = torch.randn(2, 3 * ROWS, k, generator=seed), torch.randn(2, k, n, generator=seed)
        x, w = torch.cat([x, -x], -1), torch.cat([w, w], 1)
        whole = unreplaced(x, w)
        alike = [torch.equal(unreplaced(x[:, :rows], w), whole[:, :rows]) for rows in range(1, ROWS)]
        needed = max([needed, *(rows + 1 for rows, same in enumerate(alike, 1) if not same)])
    return needed


def unreplaced(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product by torch's own kernel: `mm.out` and `baddbmm` keep theirs. beta=0 never reads its first argument."""
    if a.dim() == 2:
        return torch.mm(a, b, out=a.new_empty(a.shape[0], b.shape[1]))
    return torch.baddbmm(a.new_empty(1, 1, 1), a, b, beta=0)


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """aten::mm: [M, K] x [K, N]."""
    return product(a, b).to(a.dtype)


def addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    """aten::addmm: the product is rounded to its type before the bias is added."""
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
    """AROUND hook of `AttentionBackendRegistry.get_handler`: ours for the CPU's backend."""
    return absorbed if backend_name == "intel_amx" else original(cls, backend_name)


def absorbed(attention: Any, forward_batch: Any) -> Any:
    """The way through MLA that prefill, decode and verification share: over the latents, never over a prompt's keys."""
    # SGLang's import order: its model modules
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return AttnForwardMethod.MLA

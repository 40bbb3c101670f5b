"""Compare a loaded layer with the reference backend, one token an expert, before it serves."""

from __future__ import annotations

import torch

from ..base.errors import KimiError
from .contract import MoeBackend, PreparedMoe, QuarkMoeWeights
from .reference import ReferenceBackend

# Part of a token's norm. Rows may be rounded to bfloat16 twice, by slot and as their sum. Each rounding is off by half
# a unit in the last of 8 bits.
TOLERANCE = 2**-8
_EXPERTS = 32  # experts that the reference prepares at a time: its weights take eight times the memory


def require_layer(name: str, backend: MoeBackend, moe: PreparedMoe, weights: QuarkMoeWeights) -> None:
    """Check every expert of a layer with one token of its own; raise KimiError if one differs from the reference.

    Each token is routed to a single expert, so an error of 1 % in that expert's scales shows. Beside seven other
    experts it would drown.
    """
    shape, device, reference = weights.shape, weights.w13.device, ReferenceBackend()
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(shape.num_experts, shape.hidden, device=device, generator=generator)
    # Rows of different size reveal a kernel that takes a neighbour's row scale.
    x *= torch.linspace(0.5, 2.0, shape.num_experts, device=device)[:, None]
    expert = torch.arange(shape.num_experts, device=device)
    ids = torch.full((shape.num_experts, shape.top_k), -1, dtype=torch.int32, device=device)
    ids[expert, expert % shape.top_k] = expert.int()
    x, router = x.bfloat16(), torch.ones_like(ids, dtype=torch.float32)
    found = backend.forward(x, moe, router, ids).float()
    for some in expert.split(_EXPERTS):
        first, last = int(some[0]), int(some[-1]) + 1
        prepared = reference.prepare(weights.experts(first, last))
        own = torch.where(ids[some] < 0, -1, ids[some] - first)
        expected = reference.forward(x[some], prepared, router[some], own).float()
        away = (found[some] - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
        if not float(away.max()) <= TOLERANCE:  # also true for NaN
            worst = int(away.nan_to_num(torch.inf).argmax())
            what = f"{name}, expert {first + worst} on {backend.name}: {float(away[worst]):.2%} away from the reference"
            raise wrong_results(what, TOLERANCE)


def wrong_results(what: str, tolerance: float) -> KimiError:
    """Return the error for kernels that differ by more than `tolerance`; 0 means bit for bit."""
    return KimiError(
        f"the MoE kernels give wrong results: {what}",
        where="numbers with a known answer" if not tolerance else "random numbers",
        expected="equal bit for bit" if not tolerance else f"at most {tolerance:.2%}",
        remedy="do not serve with these kernels; set KIMI_MOE_BACKEND=triton to use the other GPU backend",
    )

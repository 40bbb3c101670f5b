"""Compare a loaded layer with the reference backend, expert by expert, before it serves."""

from __future__ import annotations

import torch

from ..base.errors import KimiError
from .contract import MoeBackend, PreparedMoe, QuarkMoeWeights
from .reference import ReferenceBackend

# Parts of a token's norm. Rows may be rounded to bfloat16 twice, by slot and as their sum. Each rounding is off by half
# a unit in the last of 8 bits.
TOLERANCE = 2**-8
# A GPU's `exp` differs in the last bits, which may round an element of `h` to the neighbouring integer. One of them
# moves a row of 64 channels by up to 0.8 %, and three by 1.5 % (simulated with random weights).
ONE_TOKEN = 2**-6
_EXPERTS = 32  # experts that the reference prepares at a time: its weights take eight times the memory
_TOKENS = 4  # of each expert: all four are hardly ever so rounded (2 of 12,288 tokens were)


def require_layer(name: str, backend: MoeBackend, moe: PreparedMoe, weights: QuarkMoeWeights) -> None:
    """Check every expert of a layer; raise KimiError if a token, or all tokens of an expert, are wrong."""
    away = layer_errors(backend, moe, weights)
    for distance, tolerance in ((away.amax(1), ONE_TOKEN), (away.amin(1), TOLERANCE)):
        if not float(distance.max()) <= tolerance:  # also true for NaN
            worst = int(distance.nan_to_num(torch.inf).argmax())
            what = f"{name}, expert {worst} on {backend.name}: {float(distance[worst]):.2%} away from the reference"
            raise wrong_results(what, tolerance)


def layer_errors(backend: MoeBackend, moe: PreparedMoe, weights: QuarkMoeWeights) -> torch.Tensor:
    """Return the distance of some tokens of each expert from the reference, as parts of their norms, float32 [E, n].

    Each token is routed to a single expert, so an error of 1 % in that expert's scales shows. Beside seven other
    experts it would drown.
    """
    shape, device, reference = weights.shape, weights.w13.device, ReferenceBackend()
    expert = torch.arange(shape.num_experts, device=device).repeat_interleave(_TOKENS)
    x = torch.randn(len(expert), shape.hidden, device=device, generator=torch.Generator(device).manual_seed(0))
    # Rows of different size reveal a kernel that takes a neighbour's row scale.
    x *= torch.linspace(0.5, 2.0, len(expert), device=device)[:, None]
    ids = torch.full((len(expert), shape.top_k), -1, dtype=torch.int32, device=device)
    ids.scatter_(1, (expert % shape.top_k)[:, None], expert[:, None].int())
    x, router = x.bfloat16(), torch.ones_like(ids, dtype=torch.float32)
    found, away = backend.forward(x, moe, router, ids).float(), []
    for first in range(0, shape.num_experts, _EXPERTS):
        last = min(first + _EXPERTS, shape.num_experts)
        prepared, some = reference.prepare(weights.experts(first, last)), slice(first * _TOKENS, last * _TOKENS)
        own = torch.where(ids[some] < 0, -1, ids[some] - first)
        expected = reference.forward(x[some], prepared, router[some], own).float()
        size = expected.norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
        away.append((found[some] - expected).norm(dim=1) / size)
    return torch.cat(away).view(shape.num_experts, _TOKENS)


def wrong_results(what: str, tolerance: float) -> KimiError:
    """Return the error for kernels that differ by more than `tolerance`; 0 means bit for bit."""
    return KimiError(
        f"the MoE kernels give wrong results: {what}",
        where="numbers with a known answer" if not tolerance else "random numbers",
        expected="equal bit for bit" if not tolerance else f"at most {tolerance:.2%}",
        remedy="do not serve with these kernels; set KIMI_MOE_BACKEND to another backend",
    )

"""Size of a KV pool by the memory of a GPU and the kernels that index it. Pure arithmetic, no I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..base.errors import KimiError
from .aiter_regime import Regime
from .page_guard import PagedKernel, token_limit

FRACTION_STEPS = 1000  # an operator types 0.815, not 0.81539917


@dataclass(frozen=True)
class Budget:
    """Memory of one GPU: `hbm_bytes` in all, `weight_bytes` of target and draft, `cell_bytes` per KV token.

    scale: factor that the engine applies to a memory fraction before it uses it.
    """

    hbm_bytes: int
    weight_bytes: int
    cell_bytes: int
    page_size: int = 1
    scale: float = 1.0

    def tokens(self, fraction: float) -> int:
        """Return the whole-page tokens that fit when weights and KV cache may take `fraction` of the memory."""
        room = int(self.hbm_bytes * fraction * self.scale) - self.weight_bytes
        return max(room // self.cell_bytes, 0) // self.page_size * self.page_size

    def fraction_for(self, tokens: int) -> float:
        """Return the exact fraction at which `tokens` fit."""
        return (self.weight_bytes + tokens * self.cell_bytes) / self.hbm_bytes / self.scale


@dataclass(frozen=True)
class PoolDecision:
    """The guard's decision for one machine and recipe.

    limit: tokens that every kernel can index, None without a limit.
    fraction, max_total_tokens: values to start the engine with.
    binding: the kernel that sets the limit, None when memory does.
    """

    limit: int | None
    fraction: float
    max_total_tokens: int
    binding: PagedKernel | None
    regime: Regime

    def safe(self, tokens: int) -> bool:
        """Return True when a pool of `tokens` overflows no kernel."""
        return self.limit is None or tokens <= self.limit


def decide(
    budget: Budget, kernels: Iterable[PagedKernel], regime: Regime, ceiling: float = 0.90, engine: Budget | None = None
) -> PoolDecision:
    """Return the largest pool that fits `ceiling` of the memory and the engine's own budget, and overflows no kernel.

    engine: the budget by which the engine sizes its pool, if that differs from the bytes that the pool takes.
    The fraction is rounded down to three decimals, so that it is safe even if the token cap is lost; the cap is exact.
    Raises KimiError when not even one page fits.
    """
    engine = engine or budget
    limit, kernel = token_limit(kernels, budget.page_size)
    fits = min(budget.tokens(ceiling), engine.tokens(ceiling))
    tokens = fits if limit is None else min(fits, limit)
    if tokens < budget.page_size:
        raise KimiError(
            "no room for the KV cache",
            where=f"{budget.hbm_bytes / 2**30:.0f} GiB a GPU, {budget.weight_bytes / 2**30:.1f} GiB of weights",
            expected=f"weights below {ceiling:.0%} of the memory",
            remedy="use more GPUs (--set tp-size=N) or GPUs with more memory",
        )
    if limit is None or fits <= limit:
        return PoolDecision(limit, ceiling, tokens, None, regime)
    fraction = int(engine.fraction_for(tokens) * FRACTION_STEPS) / FRACTION_STEPS
    return PoolDecision(limit, fraction, tokens, kernel, regime)

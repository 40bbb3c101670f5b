"""`options.deterministic`: an answer that does not depend on the other requests, by SGLang's batch-invariant operators.

What they exclude on ROCm was read in SGLang 0.5.20 and 0.5.23. Nothing of it was run on a GPU.
"""

from __future__ import annotations

from ..base.errors import KimiError
from .memory_plan import number
from .schema import ArgValue, Improvement, Recipe

CHUNK = 1024  # tokens whose hidden states, 14 KiB each, fit the 16 MiB buffer of SGLang's one-stage all-reduce
HANG = "eagle-custom-all-reduce"  # in launch/known-faults.toml
_CHANGES: dict[str, tuple[ArgValue, str]] = {
    "enable-deterministic-inference": (True, "options.deterministic: products, norms and sampling of a fixed order"),
    "attention-backend": ("triton", "SGLang refuses AITER's attention with deterministic inference"),
    "disable-custom-all-reduce": (False, "only the one-stage custom all-reduce adds in a fixed order, not RCCL"),
    "chunked-prefill-size": (
        CHUNK,
        "the one-stage all-reduce registers a larger buffer at each call, until none is left",
    ),
    "enable-torch-compile": (False, "compiled code takes its own matrix products"),
    "env.SGLANG_USE_AITER": ("0", "AITER chooses the kernel of a matrix product by the number of rows"),
    "env.SGLANG_ROCM_FUSED_DECODE_MLA": ("0", "the fused decode of SGLang's images is AITER's"),
    "env.SGLANG_TRITON_PREFILL_TRUNCATION_ALIGN_SIZE": (CHUNK, "SGLang cuts prompts at multiples of 4,096 by itself"),
}


def with_determinism(recipe: Recipe) -> Recipe:
    """The recipe with what `options.deterministic` changes. Raises KimiError for one that cannot start so."""
    if not recipe.options.deterministic:
        return recipe
    if recipe.engine != "sglang" or not recipe.hardware.gpus:
        raise KimiError(
            f"options.deterministic does not fit the recipe {recipe.name!r}",
            expected="a recipe for SGLang on GPUs; on a CPU no answer depends on other requests anyway",
        )
    ranks = number(recipe.args, "tp-size", 1)
    if recipe.draft is not None and ranks > 1 and HANG not in recipe.options.accept_faults:
        raise KimiError(
            "options.deterministic needs the custom all-reduce, which hung in EAGLE's verify step (sglang#29313)",
            where=recipe.name,
            expected="a recipe without a draft: SGLang 0.5.23 refuses RCCL here; nobody tried its one-stage kernel",
            remedy=f"--set options.speculation=off, or --set 'options.accept_faults=[\"{HANG}\"]' to try it",
        )
    changes = {name: Improvement(value=value, why=why) for name, (value, why) in _CHANGES.items()}
    return recipe.model_copy(update={"improve": recipe.improve | changes})

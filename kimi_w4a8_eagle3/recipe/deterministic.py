"""`options.deterministic`: answers that do not depend on other requests, with SGLang's batch-invariant operators.

The excluded features on ROCm come from the sources of SGLang 0.5.20 and 0.5.23. None of this has run on a GPU.
"""

from __future__ import annotations

from ..base.errors import KimiError
from .arguments import number
from .schema import ArgValue, Improvement, Recipe

CHUNK = 1024  # tokens; their hidden states, 14 KiB each, fit the 16 MiB buffer of SGLang's one-stage all-reduce
HANG = "eagle-custom-all-reduce"  # in launch/known-faults.toml
_CHANGES: dict[str, tuple[ArgValue, str]] = {
    "enable-deterministic-inference": (True, "options.deterministic: products, norms and sampling in a fixed order"),
    "attention-backend": ("triton", "SGLang refuses AITER's attention with deterministic inference"),
    "disable-custom-all-reduce": (False, "the one-stage custom all-reduce adds in a fixed order, RCCL does not"),
    "chunked-prefill-size": (
        CHUNK,
        "the one-stage all-reduce has a buffer for this chunk; it registers each larger one, until its table is full",
    ),
    "enable-torch-compile": (False, "compiled code uses its own matrix products"),
    "env.SGLANG_USE_AITER": ("0", "AITER chooses the kernel of a matrix product by the number of rows"),
    "env.SGLANG_ROCM_FUSED_DECODE_MLA": ("0", "the fused decode of SGLang's images is AITER's"),
    "env.SGLANG_TRITON_PREFILL_TRUNCATION_ALIGN_SIZE": (CHUNK, "SGLang cuts prompts at multiples of 4,096 by itself"),
}


def with_determinism(recipe: Recipe) -> Recipe:
    """Return the recipe with the changes of `options.deterministic`. Raises KimiError if it cannot start with them."""
    if not recipe.hardware.gpus:
        raise KimiError(
            f"options.deterministic does not fit the recipe {recipe.name!r}",
            expected="a recipe for SGLang on GPUs; on a CPU answers never depend on other requests",
        )
    ranks = number(recipe.args, "tp-size", 1)
    if recipe.draft is not None and ranks > 1 and HANG not in recipe.options.accept_faults:
        raise KimiError(
            "options.deterministic needs the custom all-reduce, which hung in EAGLE's verify step (sglang#29313)",
            where=recipe.name,
            expected="a recipe without a draft: SGLang 0.5.23 refuses RCCL here, and its one-stage kernel is untested",
            remedy=f"--set options.speculation=off, or --set 'options.accept_faults=[\"{HANG}\"]' to try it",
        )
    changes = {name: Improvement(value=value, why=why) for name, (value, why) in _CHANGES.items()}
    return recipe.model_copy(update={"improve": recipe.improve | changes})

"""Keep every KV-cache offset of a paged attention kernel within 32 bits. Pure arithmetic, no I/O.

AITER's ck_tile batch-prefill FMHA multiplies a page index by the page stride in int32, in elements. SGLang passes it
the cache as rows of one token, `[tokens + page_size, kv_heads, head_dim]` (the extra page takes padded tokens), so the
largest offset is `(rows - 1) * kv_heads * head_dim`. The target of these recipes is MLA and prefills with another
kernel. An EAGLE3 draft that is MHA uses this kernel, so the *draft's* shape limits the pool that both models share.

AITER's MLA decode kernels address a window of 4 GiB from the start of a layer's latents, those in Gluon one of 2 GiB.
That was measured with bf16, where 4 GiB are 2^31 elements. Rows of FP8 take half the bytes. It is not known whether
their kernels count elements in 32 bits, so FP8 gets as many rows as bf16.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..base.errors import KimiError
from .aiter_regime import Regime

INT32_MAX = 2**31 - 1
# aiter#5765, measured on gfx950 and still open: rows beyond the window are read from the wrong place.
MLA_WINDOW = 2**32
# aiter#4474: a segmentation fault beyond the window. The kernel is for gfx950; no fixed AITER version is known.
GLUON_MLA_WINDOW, GLUON_ARCH = 2**31, "gfx950"


@dataclass(frozen=True)
class KvShape:
    """The KV cache of one model on one rank.

    row_elements: elements from one token to the next in one buffer (K of one layer, or the MLA latent).
    buffers: number of such buffers (2 a layer for MHA, 1 a layer for MLA).
    """

    kind: Literal["mla", "mha"]
    layers: int
    row_elements: int
    buffers: int
    dtype_bytes: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of HBM that one token takes in all layers."""
        return self.row_elements * self.buffers * self.dtype_bytes


@dataclass(frozen=True)
class PagedKernel:
    """A kernel that indexes a paged cache; `largest` is its last correct offset, None without a limit."""

    name: str
    row_elements: int
    largest: int | None

    def largest_offset(self, tokens: int, page_size: int) -> int:
        """Return the offset of the last row, in elements, of a pool of `tokens`; it must not exceed INT32_MAX."""
        return (tokens + page_size - 1) * self.row_elements

    def max_tokens(self, page_size: int) -> int | None:
        """Return the largest whole-page pool that this kernel can index; None without a limit."""
        if self.largest is None:
            return None
        rows = self.largest // self.row_elements + 1
        return max(rows - page_size, 0) // page_size * page_size


def kv_shape(config: Mapping[str, Any], tp: int, dtype_bytes: int) -> KvShape:
    """Read the KV shape of a model from its Hugging Face config.

    MLA (`kv_lora_rank`) keeps one latent of `kv_lora_rank + qk_rope_head_dim` on every rank. MHA/GQA keeps K and V of
    `num_key_value_heads / tp` heads, at least one (heads are replicated when TP exceeds them).
    """
    text = config.get("text_config", config)
    layers = _positive(text, "num_hidden_layers")
    if isinstance(heads := text.get("num_attention_heads"), int) and heads % tp:
        raise KimiError(f"{heads} attention heads cannot be split over TP {tp}", expected=f"a divisor of {heads}")
    if text.get("kv_lora_rank"):
        row = _positive(text, "kv_lora_rank") + _positive(text, "qk_rope_head_dim")
        return KvShape("mla", layers, row, layers, dtype_bytes)
    heads = _positive(text, "num_attention_heads")
    kv_heads = text.get("num_key_value_heads") or heads
    head_dim = text.get("head_dim") or _positive(text, "hidden_size") // heads
    return KvShape("mha", layers, _heads_per_rank(kv_heads, tp) * head_dim, 2 * layers, dtype_bytes)


def paged_kernels(
    shapes: Iterable[KvShape], regime: Regime, int_max: int = INT32_MAX, arch: str | None = None
) -> list[PagedKernel]:
    """Return the paged kernels that AITER's attention backend runs over these caches on GPUs of `arch`.

    MHA caches use the batch-prefill FMHA, limited unless `regime` has 64-bit offsets. MLA latents use the MLA decode
    kernel. It is correct for the rows that lie in its window and whose elements 32 bits can count: 3,728,270 rows of
    576 bf16 or FP8.
    """
    kernels = []
    for shape in shapes:
        if shape.kind == "mha":
            largest = None if regime.wide_offsets else int_max
            kernels.append(PagedKernel("ck_tile fmha batch prefill", shape.row_elements, largest))
        else:
            name, window = ("Gluon mla decode", GLUON_MLA_WINDOW) if arch == GLUON_ARCH else ("mla decode", MLA_WINDOW)
            rows = min(window // shape.dtype_bytes, int_max + 1) // shape.row_elements
            kernels.append(PagedKernel(name, shape.row_elements, (rows - 1) * shape.row_elements))
    return list(dict.fromkeys(kernels))  # an MLA draft's latents are as wide as its target's


def token_limit(kernels: Iterable[PagedKernel], page_size: int) -> tuple[int | None, PagedKernel | None]:
    """Return the smallest token limit of `kernels` and the kernel that sets it."""
    limited = [(limit, kernel) for kernel in kernels if (limit := kernel.max_tokens(page_size)) is not None]
    return min(limited, key=lambda pair: pair[0]) if limited else (None, None)


def cap_tokens(requested: int, kernels: Iterable[PagedKernel], page_size: int) -> tuple[int, str]:
    """Reduce a pool of `requested` tokens to the number that every kernel can index.

    Returns that number and the reason in one sentence (empty when nothing was changed).
    """
    limit, kernel = token_limit(kernels, page_size)
    if limit is None or kernel is None or requested <= limit:
        return requested, ""
    offset = kernel.largest_offset(requested, page_size)
    return limit, (
        f"KV pool capped from {requested:,} to {limit:,} tokens: {kernel.name} is correct to offset {kernel.largest:,} "
        f"and {requested:,} tokens of {kernel.row_elements:,} elements reach {offset:,}"
    )


def _heads_per_rank(kv_heads: int, tp: int) -> int:
    if kv_heads % tp and tp % kv_heads:
        raise KimiError(f"{kv_heads} KV heads cannot be split over TP {tp}", expected="one to divide the other")
    return max(kv_heads // tp, 1)


def _positive(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise KimiError(f"config.json has no usable {key!r} (found {value!r})", expected="a positive whole number")
    return value

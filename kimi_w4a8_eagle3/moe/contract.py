"""Interface of the W4A8 MoE backends, and the arithmetic that all of them implement.

One projection computes `a8 = round_half_even(x / sx)` with `sx = max|x| / 127` per token, an accumulator `acc` exactly
in int32, and `y = acc * sx[t] * sw[n]` in float32. Stage 1 computes gate and up and `silu(g) * u`. Its result is
quantized again per (token, expert slot) for stage 2. Stage 2's rows are weighted by the router in float32 and summed
over the slots; the output is bfloat16. Integer accumulators agree bit for bit between backends.

The formats of the weights differ only in the accumulator. With w the integers of the codes (`WeightFormat.integers`):

    INT4   acc = sum over k of a8 * w
    MXFP4  acc = sum over blocks b of 32 k of 2**shift[n, b] * (sum over the block of a8 * w)

MXFP4's row scale sw[n] is a power of two and shift is 0..11 (`quark.packing`). A block's sum is at most 32*127*12,
and the sum of 2**shift over a row's blocks is at most MOST_STEPS, so |acc| < 2**31: the sum is exact in any order, and
shifts may be applied to the weights, to a block's sum or to a group of sums. 2**shift * w fits INT8 for shifts up to 3.
float32 rounds acc once. If a layer has rows that do not fit, its weights have several parts with the same codes. A part
leaves the blocks of the others out (shift ABSENT), and y is the sum of the parts' y, added in order in float32.

Every backend is deterministic. The output of a token depends on its row, its experts and their weights, never on the
rest of the batch, the tiles or the run. Its slots are therefore added in an order that the token alone fixes, without
atomics. A slot's row may be rounded before that, no coarser than to bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from ..base.errors import KimiError
from ..quark.weight_format import INT4, WeightFormat

if TYPE_CHECKING:
    import torch

    from ..quark.packing import Part

INT8_MAX = 127


@dataclass(frozen=True)
class MoeShape:
    """Sizes of one MoE layer on one tensor-parallel rank."""

    num_experts: int
    hidden: int
    inter: int  # intermediate size on this rank (2048 / TP for Kimi-K2.5)
    top_k: int
    weights: WeightFormat = field(default=INT4, kw_only=True)


@dataclass(frozen=True)
class QuarkMoeWeights:
    """One MoE layer as AMD Quark stores its codes, sliced for this rank, with one scale a row.

    w13: codes of [E, 2*I, H], rows 0..I-1 gate and I..2I-1 up. INT4: int32 [E, 2*I, H/8], eight nibbles a word in
        Quark's `reorder` order. MXFP4: uint8 [E, 2*I, H/2], element 2j in the low nibble of byte j.
    w2: codes of [E, H, I].
    s13: float32 [E, 2*I] and s2: float32 [E, H], the checkpoint's scales folded to one a row.
    shift13: uint8 [E, 2*I, H/32] and shift2: uint8 [E, H, I/32], a block's left shift; None for INT4.
    more: the next part of the weights, if one does not hold all blocks.
    """

    shape: MoeShape
    w13: torch.Tensor
    w2: torch.Tensor
    s13: torch.Tensor
    s2: torch.Tensor
    shift13: torch.Tensor | None = None
    shift2: torch.Tensor | None = None
    more: QuarkMoeWeights | None = None

    @classmethod
    def of(cls, shape: MoeShape, w13: torch.Tensor, w2: torch.Tensor, parts: list[tuple[Part, ...]]) -> QuarkMoeWeights:
        """Return a layer of the parts that `packing.fold_layer` returns."""
        ((shift13, s13), (shift2, s2)), *others = parts
        more = cls.of(shape, w13, w2, others) if others else None
        return cls(shape, w13, w2, s13, s2, shift13, shift2, more)

    def experts(self, first: int, last: int) -> QuarkMoeWeights:
        """Return experts first..last-1 as a layer of their own."""
        tensors = (self.w13, self.w2, self.s13, self.s2, self.shift13, self.shift2)
        shape = replace(self.shape, num_experts=last - first)
        more = self.more and self.more.experts(first, last)
        own: list[Any] = [None if t is None else t[first:last] for t in tensors]
        return QuarkMoeWeights(shape, *[*own, more])


@dataclass(frozen=True)
class PreparedMoe:
    """One MoE layer in a backend's own weight layout, which `layout` names so that a mix-up raises an error.

    shift13, shift2: the blocks' shifts, None where the layout of the weights holds them or the format has none.
    more: the next part of the weights, as in QuarkMoeWeights.
    """

    shape: MoeShape
    layout: str
    w13: torch.Tensor
    w2: torch.Tensor
    s13: torch.Tensor
    s2: torch.Tensor
    shift13: torch.Tensor | None = None
    shift2: torch.Tensor | None = None
    more: PreparedMoe | None = None

    @property
    def parts(self) -> list[PreparedMoe]:
        """This part and the next ones."""
        return [self, *(self.more.parts if self.more else [])]


class GateReader(Protocol):
    """The part of `gates.Gates` that backends need; a plain dict satisfies it too."""

    def get(self, name: str, /) -> Any:
        """Return the gate's value, or None when it is unset."""
        ...


class MoeBackend(Protocol):
    """A backend prepares a layer's weights once and then computes. It keeps no state of a layer or a batch."""

    name: str

    def unsupported(self, shape: MoeShape, device: torch.device) -> str | None:
        """Return the reason why this backend cannot run `shape` on `device`, or None."""
        ...

    def prepare(self, weights: QuarkMoeWeights) -> PreparedMoe:
        """Repack one layer, vectorised without a loop over experts, in at most one layer of extra memory."""
        ...

    def forward(
        self, x: torch.Tensor, moe: PreparedMoe, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """Run both stages.

        x: bfloat16 [T, H]; topk_weights: float32 [T, top_k]; topk_ids: int32 [T, top_k], -1 = slot not on this rank.
        Returns bfloat16 [T, H].
        """
        ...


def gpu_arch(device: torch.device) -> str | None:
    """Return `gfx942` and the like on ROCm, `sm_90` and the like on CUDA, or None when `device` is no GPU."""
    import torch  # not at the top: commands that only name shapes start without it

    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def check_call(
    x: torch.Tensor, moe: PreparedMoe, layout: str, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> None:
    """Raise KimiError for weights in another `layout` than the backend's, or for inputs of a wrong size or dtype."""
    import torch  # as above

    if moe.layout != layout:
        raise KimiError(f"the backend cannot read weights in layout {moe.layout!r}", expected=layout)
    tokens, slots = x.shape[0], (x.shape[0], moe.shape.top_k)
    wanted = {
        "x": (x, (tokens, moe.shape.hidden), torch.bfloat16),
        "topk_weights": (topk_weights, slots, torch.float32),
        "topk_ids": (topk_ids, slots, torch.int32),
    }
    for name, (tensor, size, dtype) in wanted.items():
        if tuple(tensor.shape) != size or tensor.dtype != dtype:
            raise KimiError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}", expected=f"{dtype} {size}")

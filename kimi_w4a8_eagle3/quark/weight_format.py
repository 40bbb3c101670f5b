"""The 4-bit weight formats that the MoE kernels compute, as values that need no torch."""

from __future__ import annotations

from dataclasses import dataclass

NIBBLES_PER_WORD = 8  # INT4 codes of an int32


@dataclass(frozen=True)
class WeightFormat:
    """One way to store an expert projection [N, K] in 4-bit codes.

    integers: the integer that each of the 16 codes stands for; all of them fit INT8.
    block: consecutive values of K that share a scale, or None where a row has one scale.
    """

    name: str
    integers: tuple[int, ...]
    block: int | None = None

    def __repr__(self) -> str:
        return self.name

    @property
    def largest(self) -> int:
        """The largest magnitude of a code's integer."""
        return max(map(abs, self.integers))

    @property
    def bits(self) -> float:
        """Bits of a stored weight, with its part of an 8-bit block scale."""
        return 4 + (8 / self.block if self.block else 0)


# Quark's ProgressiveSpec: two's complement, a float32 scale for each row.
INT4 = WeightFormat("INT4", (*range(8), *range(-8, 0)))
# OCP MX: E2M1 codes, an E8M0 exponent for each block. E2M1's values are multiples of one half, so they are doubled.
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)
MXFP4 = WeightFormat("MXFP4", (*_E2M1, *(-value for value in _E2M1)), block=32)
FORMATS = {stored.name: stored for stored in (INT4, MXFP4)}

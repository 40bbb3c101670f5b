"""How much a vector memory instruction moves per lane, and how that sits in registers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .state import Array


@dataclass(frozen=True)
class Form:
    """How many bytes move per lane and how they sit in registers."""

    size: int
    signed: bool = False
    d16: str = ""  # "lo" or "hi": a 16-bit half, the other half stays

    @property
    def words(self) -> int:
        """Registers per lane."""
        return max(1, self.size // 4)


FORMS = {
    **{"dword": Form(4), "dwordx2": Form(8), "dwordx3": Form(12), "dwordx4": Form(16)},
    **{"ubyte": Form(1), "sbyte": Form(1, True), "ushort": Form(2), "sshort": Form(2, True)},
    **{"byte": Form(1), "short": Form(2), "ubyte_d16": Form(1, d16="lo"), "ubyte_d16_hi": Form(1, d16="hi")},
    **{"sbyte_d16": Form(1, True, "lo"), "sbyte_d16_hi": Form(1, True, "hi")},
    **{"short_d16": Form(2, d16="lo"), "short_d16_hi": Form(2, d16="hi"), "byte_d16_hi": Form(1, d16="hi")},
}


def extend(words: Array, form: Form) -> Array:
    """Sign-extend the words of a signed form."""
    if not form.signed:
        return words
    shift = np.int32(32 - 8 * form.size)
    return ((words.view(np.int32) << shift) >> shift).view(np.uint32)

"""`python -m proof.mx_codes`: vector operations that decode eight MXFP4 codes with one `v_perm_b32` for four of them.

A lookup has eight free bytes, for the codes 0 to 7. Codes 8 to 11 repeat the sign of entry 1, 3, 5 or 7, 12 gives 0
and 13 to 15 give 255. A second step combines the lookup with bits of the code. The search tries all signs, constants of
-48 to 48, and what a lane may choose for its block, and gives each missing value of E2M1 an entry of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from kimi_w4a8_eagle3.quark.weight_format import MXFP4

from .gfx942.valu_ops import OPS, perm_b32

Step = Callable[[int, int, int, int], int]  # (byte of the lookup, code, shift, addend of the lane) -> value
CONSTANTS = sorted(range(-48, 49), key=abs)


class Way(NamedTuple):
    """Operations for eight weights without and with the block's shift, matrix products of a weight, and second step."""

    name: str
    operations: float
    shifted: float
    products: int
    step: Step


# A shift of a register of codes adds 1 by 64-bit shifts. Tables and addends of a lane come from LDS, and the comparison
# for shifts above 3 is 0.25.
WAYS = (
    Way("lookup XOR code", 7, 7.75, 1, lambda found, code, s, z: found ^ code << s),
    Way("lookup - code", 7, 7.75, 1, lambda found, code, s, z: found - (code << s)),
    Way("high bits of the lookup, low bits of the code", 7, 7.75, 1, lambda found, code, s, z: found & ~7 | code & 7),
    Way("lookup XOR the code's low bits", 9, 9.75, 1, lambda found, code, s, z: found ^ (code & 7) << s),
    Way("lookup + code, a product each", 5, 5.75, 2, lambda found, code, s, z: signed(found) + (code << s)),
    Way("lookup + (code << s) + z, a product each", 6.5, 6.75, 2, lambda f, code, s, z: signed(f) + plus(code, s, z)),
)


def signed(byte: int) -> int:
    return (byte & 0xFF ^ 0x80) - 0x80


def plus(code: int, shift: int, addend: int) -> int:
    """Return a byte of `v_lshl_add_u32`; 1 << 20 stands for a carry into the next byte."""
    return signed((code << shift) + addend) if (15 << shift) + addend < 256 else 1 << 20


def tables(way: Way, shift: int, constant: int) -> Iterator[tuple[int, int, dict[int, int]]]:
    """Yield (number of values, addend, byte of each code) of the choices; a value is `step - constant`."""
    values = {n << shift for n in MXFP4.integers}
    addends = {constant + 1 - (zero << shift) & 255 for zero in range(8, 16)} if "z" in way.name else {0}
    for addend, signs in product(addends, product((0, 255), repeat=4)):

        def value(byte: int, code: int, addend: int = addend) -> int:
            found = way.step(byte, code, shift, addend)
            return (signed(found) if way.products == 1 else found) - constant

        fills = dict(zip(range(8, 16), (*signs, 0, 255, 255, 255), strict=True))
        missing = values - {value(byte, code) for code, byte in fills.items()}
        allowed = [range(128, 256) if c % 2 and signs[c // 2] else range(128 if c % 2 else 256) for c in range(8)]
        entries = [{value(byte, code): byte for byte in allowed[code]} for code in range(8)]
        wanted = sorted(missing)
        rows = maximum_bipartite_matching(csr_array([[n in entries[code] for code in range(8)] for n in wanted]))
        chosen = {code: wanted[row] for code, row in enumerate(rows.tolist()) if row >= 0}
        yield len(values) - len(missing) + len(chosen), addend, fills | {c: entries[c][n] for c, n in chosen.items()}


def most(way: Way, shift: int, constant: int) -> int:
    return max(found[0] for found in tables(way, shift, constant))


def main() -> None:
    """Search every way, and decode every word of four codes by the last one."""
    print(f"{'way':<47}operations  products  values  with a constant  shifts of 0 to 3: operations")
    for way in WAYS:
        constant = next((k for k in CONSTANTS if most(way, 0, k) == 15), 0)
        folds = next((k for k in CONSTANTS if all(most(way, shift, k) == 15 for shift in (3, 2, 1, 0))), None)
        shifted = "no" if folds is None else f"{way.shifted} ({-folds:+d})"
        text = f"{way.name:<47}{way.operations:>10}{way.products:>10}{most(way, 0, 0):>8}"
        print(f"{text}{f'{most(way, 0, constant)} ({-constant:+d})' if constant else '':>17}{shifted:>31}")
    assert folds is not None
    codes = np.arange(1 << 16, dtype=np.uint32)
    words = np.array([(codes >> 4 * i & 15) << 8 * i for i in range(4)]).sum(0, np.uint32)
    digits = words.view(np.uint8).reshape(-1, 4)
    for shift in range(4):
        addend, table = next((z, t) for count, z, t in tables(WAYS[-1], shift, folds) if count == 15)
        low, high = np.frombuffer(bytes(table[code] for code in range(8)), np.uint32)[:, None]
        added = OPS["v_lshl_add_u32"].function(words, np.uint32(shift), np.uint32(addend * 0x01010101))
        found = perm_b32(high, low, words).view(np.int8).astype(int) + added.view(np.int8) - folds
        wanted = {n << shift for n in MXFP4.integers}
        of_code = [WAYS[-1].step(table[code], code, shift, addend) - folds for code in range(16)]
        assert (found.reshape(-1, 4) == np.array(of_code)[digits]).all() and wanted <= set(of_code)
    print(f"{len(words):,} words of four codes decode with each shift by the last way")


if __name__ == "__main__":
    main()

"""`python -m proof.mx_codes`: vector operations that decode eight MXFP4 codes with one `v_perm_b32` for four of them.

A lookup has eight free bytes, for the codes 0 to 7. Codes 8 to 11 repeat the sign of entry 1, 3, 5 or 7, 12 gives 0
and 13 to 15 give 255. A second step combines the lookup with bits of the code. The search tries all signs and all
constants of -40 to 40, and gives each missing value of E2M1 an entry of its own. A second step folds the shift of a
block if lookup and code may both be shifted left.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kimi_w4a8_eagle3.quark.weight_format import MXFP4

from .gfx942.valu_ops import perm_b32

VALUES = frozenset(MXFP4.integers)
TABLE = bytes.fromhex("00f2faedfee9faef")  # of the second row: byte = n - 12
Step = Callable[[int, int], int]  # (byte of the lookup, code) -> value, modulo 256 where it is one byte


class Way(NamedTuple):
    """One second step: operations for eight weights, matrix products of a weight, and the step."""

    name: str
    operations: int
    products: int
    step: Step


WAYS = (
    Way("lookup XOR code", 7, 1, lambda found, code: found ^ code),
    Way("lookup - code", 7, 1, lambda found, code: found - code),
    Way("high bits of the lookup, low bits of the code", 7, 1, lambda found, code: found & 0xF8 | code & 7),
    Way("lookup XOR the code's low bits", 9, 1, lambda found, code: found ^ (code & 7)),
    Way("lookup + code, a product each", 5, 2, lambda found, code: _signed(found) + code),
)


def _signed(byte: int) -> int:
    return (byte & 0xFF ^ 0x80) - 0x80


def fill(code: int, signs: tuple[int, ...]) -> int:
    """Return the byte that a code of 8 and more looks up; signs: of entries 1, 3, 5 and 7."""
    return 255 * signs[code - 8] if code < 12 else 0 if code == 12 else 255


def fixed(way: Way, signs: tuple[int, ...]) -> dict[int, int]:
    """Return the values, without a constant, of the codes that the table does not choose."""
    found = {code: way.step(fill(code, signs), code) for code in range(8, 16)}
    return {code: _signed(value) if way.products == 1 else value for code, value in found.items()}


@cache
def reach(way: Way, code: int, sign: int | None) -> frozenset[int]:
    """Return the values, without a constant, that a byte of entry `code` gives; sign: of that byte, if it is fixed."""
    found = (way.step(byte, code) for byte in (range(256) if sign is None else range(128 * sign, 128 * sign + 128)))
    return frozenset(_signed(value) if way.products == 1 else value for value in found)


def most_values(way: Way, constant: int) -> tuple[int, tuple[int, ...]]:
    """Return (most values of E2M1 with value + constant, signs)."""
    best: tuple[int, tuple[int, ...]] = 0, (0, 0, 0, 0)
    for signs in product((0, 1), repeat=4):
        missing = VALUES - {value + constant for value in fixed(way, signs).values()}
        entries = [reach(way, code, signs[code // 2] if code % 2 else None) for code in range(8)]
        placed = _matched({value: [i for i in range(8) if value - constant in entries[i]] for value in missing})
        best = max(best, (len(VALUES) - len(missing) + placed, signs))
    return best


def _matched(choices: dict[int, list[int]]) -> int:
    """Return how many values get an entry of their own."""
    owner: dict[int, int] = {}

    def place(value: int, tried: set[int]) -> bool:
        for entry in choices[value]:
            if entry not in tried:
                tried.add(entry)
                if entry not in owner or place(owner[entry], tried):
                    owner[entry] = value
                    return True
        return False

    return sum(place(value, set()) for value in choices)


def folds(way: Way, constant: int) -> bool:
    """True if the bytes of codes 8 to 15 are doubled when the code is, as the table's entries are."""
    signs = most_values(way, constant)[1]
    used = [code for code, value in fixed(way, signs).items() if value + constant in VALUES]
    bytes_ = [(code, fill(code, signs)) for code in used]
    return all((way.step(byte, 2 * code) - 2 * way.step(byte, code)) & 0xFF == 0 for code, byte in bytes_)


def main() -> None:
    """Search every way, and decode every word of four codes with TABLE."""
    print(f"{'way':<47}operations  products  values  with a constant  shift folds")
    for way in WAYS:
        plain, constant = most_values(way, 0)[0], max(range(-40, 41), key=lambda k: most_values(way, k)[0])
        most = most_values(way, constant)[0]
        constant = constant if most > plain else 0
        text = f"{way.name:<47}{way.operations:>10}{way.products:>10}{plain:>8}"
        print(f"{text}{f'{most} ({constant:+d})':>17}{'yes' if folds(way, constant) else 'no':>13}")
    codes = np.arange(1 << 16, dtype=np.uint32)
    words: NDArray[np.uint32] = np.array([(codes >> 4 * i & 15) << 8 * i for i in range(4)]).sum(0, np.uint32)
    of_code = [12, -1, 4, -6, 6, -8, 8, -12, 3, 2, 1, 0, None, -2, -3, -4]  # 12 stands for no value
    digits = words.view(np.uint8).reshape(-1, 4)
    used = (digits != 12).all(1)
    table = np.array([0 if n is None else n for n in of_code], np.int8)
    low, high = np.frombuffer(TABLE, np.uint32)[:, None]
    found = (perm_b32(high, low, words) ^ words).view(np.int8).reshape(-1, 4) + np.int8(12)
    assert (found[used] == table[digits[used]]).all()
    print(f"{int(used.sum()):,} words of four codes decode with table {TABLE.hex(' ')} XOR code, byte = n - 12")


if __name__ == "__main__":
    main()

"""Philox4x32-10, the counter-based generator behind every draw (Salmon et al., SC 2011), in numpy.

Noise depends only on the request's seed (the key) and on the position and the token (the counter). A position therefore
has the same noise in plain decoding and in a verify step, in any batch, and after a retraction.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox(
    seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], counters: int
) -> tuple[npt.NDArray[np.uint64], ...]:
    """Return four uint64 arrays [R, counters] of 32-bit random words.

    seeds: int64 [R], the 64-bit key of each row.
    positions: int64 [R], below 2^32, the second counter word of a row.
    The first counter word is 0 to counters - 1; the other two are 0.
    """
    rows = len(seeds)
    keys = seeds.astype(np.uint64)[:, None]
    key_0, key_1 = keys & _LOW, keys >> _HALF
    words = [
        np.broadcast_to(np.arange(counters, dtype=np.uint64), (rows, counters)),
        np.broadcast_to(positions.astype(np.uint64)[:, None], (rows, counters)),
        np.zeros((rows, counters), np.uint64),
        np.zeros((rows, counters), np.uint64),
    ]
    for round_ in range(_ROUNDS):
        products = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        round_keys = ((key + np.uint64(round_ * weyl)) & _LOW for key, weyl in zip((key_0, key_1), _WEYL, strict=True))
        word_0, word_2 = (
            (product >> _HALF) ^ word ^ key
            for product, word, key in zip(reversed(products), (words[1], words[3]), round_keys, strict=True)
        )
        words = [word_0, products[1] & _LOW, word_2, products[0] & _LOW]
    return tuple(words)

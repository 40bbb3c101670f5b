"""A vocabulary of 163,840 tokens like a large model's, made without one: bytes, words, names, punctuation and scripts.

A mask's time depends on how long the tokens are and which of them begin alike. The mean length is 7 bytes here and 6 in
the vocabulary of Qwen, with which the costliest masks took between half and twice as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, product
from random import Random

SIZE = 163_840
_STARTS = ["", "b", "c", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "st", "tr", "ch", "qu"]
_SYLLABLES = [
    *map("".join, product(_STARTS, ["a", "e", "i", "o", "u", "ou", "ea"], ["", "n", "r", "s", "t", "l", "ng", "ck"]))
]
_MARKS = "\",:{}[]().;/\\<>!?'`|&%$@"


def vocabulary(size: int = SIZE) -> list[bytes]:
    """Return `size` different tokens, the same ones at every call; the first 256 are the bytes."""
    tokens = dict.fromkeys(bytes([byte]) for byte in range(256))
    texts = _texts()
    while len(tokens) < size:
        tokens[next(texts)] = None
    return list(tokens)


def _texts() -> Iterator[bytes]:
    numbers = chain(map(str, range(1000)), (f"{number:03d}" for number in range(1000)))
    runs = (character * times for times in range(2, 40) for character in " \n\t-=*#_.")
    characters = map(chr, chain(range(0x4E00, 0x4E00 + 12_000), range(0x400, 0x460)))
    marks = map("".join, chain(product(_MARKS, _MARKS + " \n"), product(_MARKS, _MARKS, _MARKS)))
    return (text.encode() for text in chain(numbers, runs, characters, marks, _words(Random(1))))


def _words(random: Random) -> Iterator[str]:
    while True:
        kind = random.random()
        if kind < 0.15:
            yield "".join(chr(random.randrange(0x4E00, 0x4E00 + 3000)) for _ in range(random.randint(2, 3)))
        elif kind < 0.22:
            yield "".join(chr(random.randrange(0x430, 0x450)) for _ in range(random.randint(2, 5)))
        else:
            word = "".join(random.choice(_SYLLABLES) for _ in range(random.choice((1, 2, 2))))
            word = word.capitalize() if random.random() < 0.3 else word
            before, after = random.choices([(" ", ""), ("", ""), ("m", ""), ("", "m"), ("_", "")], [55, 31, 7, 4, 3])[0]
            yield before.replace("m", random.choice(_MARKS)) + word + after.replace("m", random.choice(_MARKS))

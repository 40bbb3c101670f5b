"""Checks of the pictures in a body: their format, size and parts, read from the bytes before the engine decodes them.

Only `data:` URLs are accepted. Media that the server fetches could not be checked before they are decoded, and a client
could make the server connect to any address.

Pillow is not used here. It joins or inflates every part of a header on opening, so thousands of small parts would block
the event loop for minutes. They would take the same time in the engine, so their number is limited.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import pybase64

from .answers import Refusal

MAX_PIXELS = 2**26  # of all pictures of one request: SGLang decodes them together, at three or more bytes per pixel
_MAX_PICTURES = 256
_MAX_COMPRESSED = 64  # texts and profiles of all pictures: Pillow inflates each to 1 MiB at most
_PARTS, _PART_BYTES = 64, 128  # parts that a picture may have, and one more for each so many bytes
_JPEG_PARTS = 64  # before the pixels: Pillow joins the Exif ones, which costs their size times their number
_COMPRESSED = (b"zTXt", b"iTXt", b"iCCP")
_JPEG_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


class _Header(NamedTuple):
    """Size in pixels, number of compressed parts, and True for more than one frame."""

    width: int
    height: int
    compressed: int = 0
    moves: bool = False


def check_pictures(sources: list[tuple[str, Any]]) -> int:
    """Return the characters of all pictures, given as (field, source); raise Refusal for one not to be decoded."""
    for name, source in sources:
        if not (isinstance(source, str) and source.startswith("data:")):
            raise Refusal(
                "the server fetches no media, neither from the network nor from files; send a data: URL", param=name
            )
    if len(sources) > _MAX_PICTURES:
        name = sources[0][0]
        raise Refusal(f"{name} holds {len(sources)} pictures; at most {_MAX_PICTURES} are read", param=name)
    pixels = compressed = 0
    for name, source in sources:
        header = _read(source, name)
        pixels += header.width * header.height
        compressed += header.compressed
        if pixels > MAX_PIXELS:
            raise Refusal(f"the pictures under {name} have more than {MAX_PIXELS} pixels in all", param=name)
        if compressed > _MAX_COMPRESSED:
            why = f"the pictures under {name} have more than {_MAX_COMPRESSED} compressed texts and profiles in all"
            raise Refusal(why, param=name)
    return sum(len(source) - source.index(",") for _, source in sources)


def _read(source: str, name: str) -> _Header:
    try:
        data = pybase64.b64decode(source.partition(",")[2], validate=True)  # as SGLang does, whatever the media type
        header = _header(data)
    except (ValueError, IndexError, struct.error):
        why = f"{name} holds a picture that is broken, has too many parts, or is not one of PNG, JPEG, WEBP, GIF"
        raise Refusal(why, param=name) from None
    if header.moves:
        raise Refusal(f"{name} holds an animated picture; send a single frame", param=name)
    return header


def _header(data: bytes) -> _Header:
    """Read the header of a picture; raise ValueError, IndexError or struct.error for a broken one."""
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        header = _png(data)
    elif data[:2] == b"\xff\xd8":
        header = _jpeg(data)
    elif data[:6] in (b"GIF87a", b"GIF89a"):
        header = _gif(data)
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        header = _webp(data)
    else:
        raise ValueError("another format")
    if header.width == 0 or header.height == 0:
        raise ValueError("no pixels")
    return header


def _png(data: bytes) -> _Header:
    kinds = []
    at = 8
    for _ in _at_most_parts(data):
        if at >= len(data):
            break
        length, kind = struct.unpack_from(">I4s", data, at)
        kinds.append(kind)
        at += 12 + length
    if kinds[0] != b"IHDR" or b"IDAT" not in kinds:
        raise ValueError("no pixels")
    width, height = struct.unpack_from(">II", data, 16)
    return _Header(width, height, sum(map(kinds.count, _COMPRESSED)), b"acTL" in kinds)


def _jpeg(data: bytes) -> _Header:
    size = (0, 0)
    at = 2
    for _ in range(_JPEG_PARTS):
        mark, kind, length = struct.unpack_from(">BBH", data, at)
        if mark != 0xFF:
            raise ValueError("no marker")
        if kind == 0xFF:  # a fill byte
            at += 1
            continue
        if kind in _JPEG_SIZES:
            size = struct.unpack_from(">HH", data, at + 5)
        if kind == 0xDA:  # the pixels follow
            return _Header(size[1], size[0])
        at += 2 + length
    raise ValueError("too many parts")


def _gif(data: bytes) -> _Header:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + _colors(flags)
    frames = 0
    parts = _at_most_parts(data)
    while at < len(data) and data[at] != 0x3B:
        next(parts)
        if data[at] == 0x21:
            at += 2
        elif data[at] == 0x2C:
            left, top, wide, high, flags = struct.unpack_from("<HHHHB", data, at + 1)
            width, height = max(width, left + wide), max(height, top + high)  # Pillow enlarges the canvas
            frames += 1
            at += 11 + _colors(flags)
        else:
            raise ValueError("no block")
        while at < len(data) and data[at]:
            next(parts)
            at += 1 + data[at]
        at += 1
    return _Header(width, height, moves=frames > 1)


def _colors(flags: int) -> int:
    """Return the bytes of a GIF's table of colors."""
    return 3 * 2 ** (flags % 8 + 1) if flags & 0x80 else 0


def _webp(data: bytes) -> _Header:
    kind = data[12:16]
    if kind == b"VP8X":
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
        return _Header(width, height, moves=bool(data[20] & 2))
    if kind == b"VP8L":
        sizes = int.from_bytes(data[21:25], "little")
        return _Header(sizes % 2**14 + 1, (sizes >> 14) % 2**14 + 1)
    if kind != b"VP8 ":
        raise ValueError("no pixels")
    width, height = struct.unpack_from("<HH", data, 26)
    return _Header(width % 2**14, height % 2**14)


def _at_most_parts(data: bytes) -> Iterator[int]:
    """Yield once for each part that a picture of this size may have, then raise ValueError."""
    yield from range(_PARTS + len(data) // _PART_BYTES)
    raise ValueError("too many parts")

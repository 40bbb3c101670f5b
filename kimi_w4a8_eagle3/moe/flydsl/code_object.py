"""Reader of a code object's AMDGPU metadata, a MessagePack document in a note of the ELF file."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from io import BytesIO
from typing import Any

from ...base.errors import KimiError
from .objects import ARCH, CodeObject

_NOTE_SEGMENT, _METADATA_NOTE = 4, 32


def describe(image: bytes, arguments: int) -> CodeObject:
    """Return the manifest entry of a code object whose kernel takes `arguments` arguments from the host."""
    metadata = read_metadata(image)
    arch, kernels = metadata["amdhsa.target"].rpartition("-")[2].partition(":")[0], metadata["amdhsa.kernels"]
    if arch != ARCH or len(kernels) != 1 or len(kernels[0][".args"]) < arguments:
        raise KimiError(
            f"a compiler made {len(kernels)} kernels for {arch}: {kernels}", expected=f"one for {ARCH}, {arguments=}"
        )
    kernel = kernels[0]
    digest = hashlib.sha256(image).hexdigest()
    return CodeObject(
        file=f"{kernel['.name']}-{digest[:16]}.co",
        sha256=digest,
        symbol=kernel[".name"],
        arguments=tuple((given[".offset"], given[".size"]) for given in kernel[".args"][:arguments]),
        kernarg_bytes=kernel[".kernarg_segment_size"],
        block=tuple(kernel.get(".reqd_workgroup_size", (kernel[".max_flat_workgroup_size"], 1, 1))),
        spills=kernel[".vgpr_spill_count"] + kernel[".sgpr_spill_count"],
    )


def read_metadata(image: bytes) -> dict[str, Any]:
    """Return the AMDGPU metadata of a code object; raise KimiError for a file that has none."""
    try:
        return next(_value(BytesIO(note)) for kind, note in _notes(image) if kind == _METADATA_NOTE)
    except (struct.error, StopIteration):
        raise KimiError(
            "this is not a code object: it has no AMDGPU metadata", expected="an ELF file for AMDGPU"
        ) from None


def _notes(image: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (type, content) of every note of a 64-bit little-endian ELF file."""
    (headers,) = struct.unpack_from("<Q", image, 32)
    size, count = struct.unpack_from("<HH", image, 54)
    for number in range(count):
        kind, _, at, _, _, length = struct.unpack_from("<IIQQQQ", image, headers + number * size)
        end = at + length
        while kind == _NOTE_SEGMENT and at < end:
            name, content, note = struct.unpack_from("<III", image, at)
            at += 12 + _padded(name)
            yield note, image[at : at + content]
            at += _padded(content)


def _padded(size: int) -> int:
    return -(-size // 4) * 4


def _value(stream: BytesIO) -> Any:
    """Read one MessagePack value of the kinds that LLVM writes: map, list, text, bool, number >= 0."""

    def number(size: int) -> int:
        return int.from_bytes(stream.read(size), "big")

    tag = number(1)
    if tag < 0x80:
        return tag
    if tag < 0x90 or tag in (0xDE, 0xDF):
        count = tag & 15 if tag < 0x90 else number(2 << (tag - 0xDE))
        return {_value(stream): _value(stream) for _ in range(count)}
    if tag < 0xA0 or tag in (0xDC, 0xDD):
        return [_value(stream) for _ in range(tag & 15 if tag < 0xA0 else number(2 << (tag - 0xDC)))]
    if tag < 0xC0 or 0xD9 <= tag <= 0xDB:
        return stream.read(tag & 31 if tag < 0xC0 else number(1 << (tag - 0xD9))).decode()
    if tag in (0xC2, 0xC3):
        return tag == 0xC3
    if 0xCC <= tag <= 0xCF:
        return number(1 << (tag - 0xCC))
    raise KimiError(f"the metadata of a code object has a value of unknown kind {tag:#x}")

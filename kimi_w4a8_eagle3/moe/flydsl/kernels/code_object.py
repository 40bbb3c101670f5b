"""Reader of a code object's AMDGPU metadata, a MessagePack document in a note of the ELF file."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import Any

from ....base.errors import KimiError
from ..objects import ARCH, CodeObject

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
    import msgspec  # optional: the extra `kernels`

    try:
        return dict(next(msgspec.msgpack.decode(note) for kind, note in _notes(image) if kind == _METADATA_NOTE))
    except (struct.error, StopIteration, msgspec.DecodeError):
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
            at += 12 + (name + 3 & ~3)
            yield note, image[at : at + content]
            at += content + 3 & ~3

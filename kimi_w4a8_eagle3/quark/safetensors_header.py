"""Reader of safetensors headers: finds where each tensor lies, and checks that files and index agree.

A file is an 8-byte little-endian header length, a JSON header `{name: {dtype, shape, data_offsets}}` and the data.
Reading headers takes seconds for a checkpoint of hundreds of gigabytes. Every error names file and tensor, which the
safetensors library's own errors do not.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from ..base.errors import KimiError
from .config import read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
ITEM_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
# Integers of the same size, and the mask of their exponent.
EXPONENT_BITS = {"F32": ("<u4", 0x7F800000), "BF16": ("<u2", 0x7F80)}
_MAX_HEADER = 100_000_000  # the limit of the safetensors library
_MAX_RUN = 64 << 20  # bytes read at once
_READERS = 8
_FETCH = "fetch the file again (`kimi-w4a8 fetch`)"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a safetensors file; `start` is its absolute position in the file, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    nbytes: int


@dataclass
class Checkpoint:
    """All tensors of a checkpoint directory, and the problems of its files.

    `unread` names the tensors that the index places in shards whose headers could not be read.
    """

    directory: Path
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    problems: list[KimiError] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of one safetensors file.

    Raises KimiError when the file is missing, its header is malformed, or the data is shorter than the header says.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8 or length > _MAX_HEADER:
                raise _bad_header(path, f"a header of {length:,} bytes in a file of {size:,} bytes")
            raw = json.loads(file.read(length))
    except FileNotFoundError:
        raise KimiError(f"{path.name} is missing", str(path), "a safetensors file", _FETCH) from None
    except OSError as error:
        raise KimiError(f"{path.name} cannot be read: {error.strerror}", str(path), "a readable file") from error
    except ValueError as error:
        raise _bad_header(path, f"its JSON does not parse ({error})") from error
    if not isinstance(raw, dict):
        raise _bad_header(path, f"its JSON is a {type(raw).__name__}")
    raw.pop("__metadata__", None)
    begin = 8 + length
    tensors = {name: _tensor(path, name, entry, begin) for name, entry in raw.items()}
    needed = max((t.start + t.nbytes for t in tensors.values()), default=begin)
    if needed > size:
        cut = [t.name for t in tensors.values() if t.start + t.nbytes > size]
        raise KimiError(
            f"{path.name} is truncated: {size:,} bytes, its header needs {needed:,} "
            f"({len(cut)} of {len(tensors)} tensors are cut, the first is {cut[0]})",
            str(path),
            f"{needed:,} bytes",
            _FETCH,
        )
    return tensors


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read the headers of all shards of a directory and check them against the index; collect problems, raise none.

    Reported are: no safetensors at all, an unreadable index, shards that are missing, truncated or malformed, tensors
    that the index places in a shard without them, and files whose tensors no index entry names.
    """
    checkpoint = Checkpoint(directory)
    try:
        index = _read_index(directory)
    except KimiError as error:
        checkpoint.problems.append(error)
        return checkpoint
    named = sorted(set(index.values())) if index is not None else [SINGLE_NAME]
    headers = _read_headers(directory, named, checkpoint)
    for name, shard in (index or {}).items():
        if shard not in headers:
            checkpoint.unread.add(name)
        elif name not in headers[shard]:
            checkpoint.problems.append(
                KimiError(
                    f"tensor {name} is not in {shard}",
                    str(directory / shard),
                    f"the tensor, as {INDEX_NAME} says",
                    _FETCH,
                )
            )
    for tensors in headers.values():
        checkpoint.tensors.update(tensors)
    if index is not None:
        _check_unlisted(directory, set(named), checkpoint)
    return checkpoint


def find_non_finite(tensors: Iterable[TensorInfo]) -> list[tuple[TensorInfo, int]]:
    """Return the tensors that contain NaN or Inf, with the number of such values.

    tensors: of a dtype in EXPONENT_BITS. Neighbours in a file are read as one run, so a shard whose scales lie together
        (safetensors sorts by dtype) costs one read. Files are read in parallel.
    """
    groups: dict[tuple[Path, str], list[TensorInfo]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.file, tensor.dtype), []).append(tensor)
    with ThreadPoolExecutor(_READERS) as pool:
        found = pool.map(_non_finite_in_group, groups.values())
        return [item for items in found for item in items]


def _non_finite_in_group(tensors: list[TensorInfo]) -> list[tuple[TensorInfo, int]]:
    """Search tensors of one file and one dtype; NaN and Inf are the values whose exponent bits are all ones."""
    import numpy as np  # takes a fifth of a command's start, and most commands read headers only

    integer, exponent = EXPONENT_BITS[tensors[0].dtype]
    size = np.dtype(integer).itemsize
    bad = []
    for run in _runs(tensors):
        start, count = run[0].start, sum(t.nbytes for t in run) // size
        values = np.fromfile(run[0].file, dtype=integer, count=count, offset=start)
        broken = (values & exponent) == exponent
        if broken.any():
            counts = [(t, int(broken[(t.start - start) // size :][: t.nbytes // size].sum())) for t in run]
            bad += [(tensor, count) for tensor, count in counts if count]
    return bad


def _runs(tensors: list[TensorInfo]) -> Iterator[list[TensorInfo]]:
    """Group tensors of one file into runs without gaps, of at most _MAX_RUN bytes (or one tensor)."""
    run: list[TensorInfo] = []
    for tensor in sorted(tensors, key=lambda t: t.start):
        if run and (
            tensor.start != run[-1].start + run[-1].nbytes or tensor.start + tensor.nbytes - run[0].start > _MAX_RUN
        ):
            yield run
            run = []
        run.append(tensor)
    if run:
        yield run


def _read_index(directory: Path) -> dict[str, str] | None:
    """Return the index's tensor -> shard map, or None for a checkpoint of a single file."""
    path = directory / INDEX_NAME
    if not path.exists():
        if (directory / SINGLE_NAME).exists():
            return None
        found = sorted(p.name for p in directory.glob("*.safetensors"))
        raise KimiError(
            f"{INDEX_NAME} is missing" + (f" beside {len(found)} shards" if found else ", and so are the weights"),
            str(directory),
            f"{INDEX_NAME} with its shards, or one {SINGLE_NAME}",
            _FETCH,
        )
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise KimiError(f"{INDEX_NAME} has no weight_map", str(path), "a map from tensor to shard", _FETCH)
    one_tensor = {shard if isinstance(shard, str) else repr(shard): name for name, shard in weight_map.items()}
    for name, shard in ((name, weight_map[name]) for name in one_tensor.values()):
        if not isinstance(shard, str) or Path(shard).name != shard or "\0" in shard:
            raise KimiError(f"{INDEX_NAME} places {name} in {shard!r}", str(path), "a file name beside the index")
    return weight_map


def _read_headers(directory: Path, names: list[str], checkpoint: Checkpoint) -> dict[str, dict[str, TensorInfo]]:
    headers = {}
    for name in names:
        try:
            headers[name] = read_header(directory / name)
            checkpoint.files.append(directory / name)
        except KimiError as error:
            checkpoint.problems.append(error)
    return headers


def _check_unlisted(directory: Path, named: set[str], checkpoint: Checkpoint) -> None:
    """Report files that the index does not name, unless they only repeat tensors: the others would not load."""
    for path in sorted(directory.glob("*.safetensors")):
        if path.name in named:
            continue
        try:
            unlisted = [name for name in read_header(path) if name not in checkpoint.tensors]
        except KimiError as error:
            checkpoint.problems.append(error)
            continue
        if unlisted:
            checkpoint.problems.append(
                KimiError(
                    f"shard {path.name} is missing from {INDEX_NAME}: {len(unlisted)} of its tensors would not be "
                    f"loaded, the first is {unlisted[0]}",
                    str(directory / INDEX_NAME),
                    "every shard of the directory in the weight_map",
                    "fetch the index again, or remove the file if it belongs to another checkpoint",
                )
            )


def _tensor(path: Path, name: str, entry: object, begin: int) -> TensorInfo:
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]  # type: ignore[index]
        bits = ITEM_BITS[dtype] * math.prod(shape)
        fits = all(isinstance(n, int) and n >= 0 for n in (*shape, start, end)) and bits == 8 * (end - start)
    except (TypeError, ValueError, KeyError) as error:
        raise _bad_header(path, f"tensor {name} has the entry {str(entry)[:120]}") from error
    if not fits:
        raise _bad_header(path, f"tensor {name} of {dtype} {list(shape)} lies at bytes {start} to {end}")
    return TensorInfo(name, dtype, shape, path, begin + start, end - start)


def _bad_header(path: Path, found: str) -> KimiError:
    return KimiError(
        f"{path.name} has a malformed safetensors header: {found}",
        str(path),
        "8 bytes of header length, then JSON with dtype, shape and data_offsets of each tensor",
        _FETCH,
    )

"""Find where each tensor of a checkpoint lies, and check that its safetensors files and its index agree.

The safetensors library validates a header: its length and JSON, every dtype and shape, offsets without overlap or gap,
and the file's size. It does not tell offsets, so the valid JSON is read once more. A checkpoint of hundreds of
gigabytes takes seconds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from ..base.errors import KimiError
from ..base.files import read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
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

    @property
    def text_prefix(self) -> str:
        """Prefix of `layers.` in the text model's tensor names."""
        wrapped = any(name.startswith("language_model.") for name in self.tensors)
        return "language_model.model." if wrapped else "model."


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of one safetensors file.

    Raises KimiError when the file is missing, its header is malformed, or the data is shorter than the header says.
    """
    from safetensors import SafetensorError, safe_open  # optional: safetensors

    try:
        with safe_open(path, framework="np"), path.open("rb") as file:  # the library has validated the file then
            length = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(length))
    except FileNotFoundError:
        raise KimiError(f"{path.name} is missing", str(path), "a safetensors file", _FETCH) from None
    except OSError as error:
        raise KimiError(f"{path.name} cannot be read: {error.strerror}", str(path), "a readable file") from error
    except SafetensorError as error:
        expected = "a header of JSON, and as many bytes of data as it says"
        raise KimiError(f"{path.name} is truncated or malformed: {error}", str(path), expected, _FETCH) from error
    entries.pop("__metadata__", None)
    return {
        name: TensorInfo(name, entry["dtype"], tuple(entry["shape"]), path, 8 + length + first, end - first)
        for name, entry in entries.items()
        for first, end in (entry["data_offsets"],)
    }


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read the headers of all shards of a directory and check them against the index; collect problems, raise none.

    Reported are: no safetensors at all, an unreadable index, shards that are missing, truncated or malformed, and
    tensors that the index places in a shard without them.
    """
    checkpoint = Checkpoint(directory)
    try:
        index = _read_index(directory)
    except KimiError as error:
        checkpoint.problems.append(error)
        return checkpoint
    headers: dict[str, dict[str, TensorInfo]] = {}
    for shard in sorted(set(index.values())) if index is not None else [SINGLE_NAME]:
        try:
            headers[shard] = read_header(directory / shard)
        except KimiError as error:
            checkpoint.problems.append(error)
            continue
        checkpoint.files.append(directory / shard)
        checkpoint.tensors.update(headers[shard])
    for name, shard in (index or {}).items():
        if shard not in headers:
            checkpoint.unread.add(name)
        elif name not in headers[shard]:
            found, expected = f"tensor {name} is not in {shard}", f"the tensor, as {INDEX_NAME} says"
            checkpoint.problems.append(KimiError(found, str(directory / shard), expected, _FETCH))
    return checkpoint


def _read_index(directory: Path) -> dict[str, str] | None:
    """Return the index's tensor -> shard map, or None for a checkpoint of a single file."""
    path = directory / INDEX_NAME
    if not path.exists():
        if (directory / SINGLE_NAME).exists():
            return None
        shards = len(list(directory.glob("*.safetensors")))
        raise KimiError(
            f"{INDEX_NAME} is missing" + (f" beside {shards} shards" if shards else ", and so are the weights"),
            str(directory),
            f"{INDEX_NAME} with its shards, or one {SINGLE_NAME}",
            _FETCH,
        )
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise KimiError(f"{INDEX_NAME} has no weight_map", str(path), "a map from tensor to shard", _FETCH)
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or "\0" in shard:
            raise KimiError(f"{INDEX_NAME} places {name} in {shard!r}", str(path), "a file name beside the index")
    return weight_map

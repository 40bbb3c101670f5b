"""What quantization did to each weight: relative error, SQNR, rows that fare badly; dtypes and sizes of the whole."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..base.errors import KimiError
from .dequantize import dequantize, read_module
from .safetensors_header import Checkpoint, read_checkpoint

OUTLIER_FACTOR = 2.0


@dataclass(frozen=True)
class WeightError:
    """One quantized weight [rows, columns] against its source.

    relative_error: |q - w| / |w| in the Frobenius norm. sqnr_db: 20 log10 of its inverse. outlier_rows: rows whose own
    relative error is over twice the median row's; worst_row and worst_row_error: the largest of them.
    """

    name: str
    rows: int
    columns: int
    relative_error: float
    sqnr_db: float
    outlier_rows: int
    worst_row: int
    worst_row_error: float


@dataclass(frozen=True)
class Report:
    """All quantized weights of a checkpoint; counts and bytes by dtype, before and after."""

    source: str
    destination: str
    weights: list[WeightError] = field(default_factory=list)
    dtypes_before: dict[str, int] = field(default_factory=dict)
    dtypes_after: dict[str, int] = field(default_factory=dict)
    bytes_before: int = 0
    bytes_after: int = 0
    unchanged: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, which has no infinity: the SQNR of an exact weight is null."""
        content = asdict(self)
        for weight in content["weights"]:
            weight["sqnr_db"] = None if math.isinf(weight["sqnr_db"]) else weight["sqnr_db"]
        return content

    def kinds(self) -> list[KindError]:
        """The weights grouped by their names with numbers left out, worst first."""
        groups: dict[str, list[WeightError]] = defaultdict(list)
        for weight in self.weights:
            groups[re.sub(r"\.\d+\.", ".*.", weight.name)].append(weight)
        return sorted((KindError.of(name, group) for name, group in groups.items()), key=lambda kind: kind.sqnr_db)


@dataclass(frozen=True)
class KindError:
    """Weights of one kind: the mean error, and the weight with the worst."""

    name: str
    count: int
    relative_error: float
    sqnr_db: float
    outlier_rows: int
    worst: WeightError

    @classmethod
    def of(cls, name: str, group: list[WeightError]) -> KindError:
        """Summed over `group`."""
        worst = max(group, key=lambda weight: weight.relative_error)
        mean = sum(weight.relative_error for weight in group) / len(group)
        return cls(name, len(group), mean, worst.sqnr_db, sum(weight.outlier_rows for weight in group), worst)


def compare(source: Path, destination: Path) -> Report:
    """Read both checkpoints and compare every weight that has a scale in `destination`; one weight is in memory.

    Raises KimiError when one of them is broken or a weight is missing from the source.
    """
    before, after = _read(source), _read(destination)
    with ExitStack() as stack:
        opened = _Files(stack)
        weights = [
            measure(module, opened.weight(before, module), opened.weight(after, module))
            for module in _quantized_modules(after)
        ]
    same = sum(
        1
        for name, tensor in after.tensors.items()
        if name in before.tensors
        and (tensor.dtype, tensor.shape) == (before.tensors[name].dtype, before.tensors[name].shape)
    )
    return Report(
        str(source),
        str(destination),
        weights,
        _dtypes(before),
        _dtypes(after),
        _bytes(before),
        _bytes(after),
        same,
    )


def measure(name: str, original: Tensor, quantized: Tensor) -> WeightError:
    """Both float32 [N, K]."""
    if original.shape != quantized.shape:
        raise KimiError(f"{name} is {list(original.shape)} before and {list(quantized.shape)} after", where="report")
    difference = (quantized - original).double().norm(dim=1)
    size = original.double().norm(dim=1)
    rows = torch.where(size > 0, difference / size.clamp(min=1e-300), difference)
    relative = float(difference.norm() / size.norm().clamp(min=1e-300))
    worst = int(rows.argmax())
    return WeightError(
        name=name,
        rows=original.shape[0],
        columns=original.shape[1],
        relative_error=relative,
        sqnr_db=-20 * math.log10(relative) if relative else math.inf,
        outlier_rows=int((rows > OUTLIER_FACTOR * rows.median()).sum()),
        worst_row=worst,
        worst_row_error=float(rows[worst]),
    )


class _Files:
    """Shards opened once each; the modules of a checkpoint read from them."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._open: dict[Path, Any] = {}
        self._names: dict[int, dict[str, list[str]]] = {}

    def weight(self, checkpoint: Checkpoint, module: str) -> Tensor:
        names = self._by_module(checkpoint).get(module)
        if names is None:
            raise KimiError(f"{module} is not in this checkpoint", str(checkpoint.directory), "source of the other one")
        path = checkpoint.tensors[names[0]].file
        if path not in self._open:
            self._open[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        return dequantize(read_module(self._open[path], module, names))

    def _by_module(self, checkpoint: Checkpoint) -> dict[str, list[str]]:
        if id(checkpoint) not in self._names:
            modules: dict[str, list[str]] = defaultdict(list)
            for name in checkpoint.tensors:
                modules[name.rpartition(".")[0]].append(name)
            self._names[id(checkpoint)] = modules
        return self._names[id(checkpoint)]


def _quantized_modules(checkpoint: Checkpoint) -> Iterator[str]:
    for name in checkpoint.tensors:
        if name.endswith(".weight_scale"):
            yield name.removesuffix(".weight_scale")


def _read(directory: Path) -> Checkpoint:
    checkpoint = read_checkpoint(directory)
    if checkpoint.problems:
        raise checkpoint.problems[0]
    return checkpoint


def _dtypes(checkpoint: Checkpoint) -> dict[str, int]:
    return dict(Counter(tensor.dtype for tensor in checkpoint.tensors.values()).most_common())


def _bytes(checkpoint: Checkpoint) -> int:
    return sum(file.stat().st_size for file in checkpoint.files)

"""Search the small tensors of a checkpoint for NaN and Inf: norms, scales, routers."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .findings import Findings, Problem
from .safetensors_header import Checkpoint, TensorInfo

# Kimi-K2.5's router has 5.5 MB a layer. All tensors up to this size are 2 GB of its 534, and with MXFP4's scales 34.
SMALL = 8 << 20
# Unsigned integers of the same size, and the bits that are all ones in NaN and Inf.
_NON_FINITE = {
    "F64": ("<u8", 0x7FF0000000000000),
    "F32": ("<u4", 0x7F800000),
    "BF16": ("<u2", 0x7F80),
    "F16": ("<u2", 0x7C00),
    "F8_E4M3": ("u1", 0x7F),
    "F8_E5M2": ("u1", 0x7C),
    "F8_E8M0": ("u1", 0xFF),
}
_READERS = 8


def check_small_tensors(checkpoint: Checkpoint) -> tuple[list[Problem], int]:
    """Find NaN and Inf in tensors of at most 8 MiB; return the problems and the number of tensors that were read.

    One NaN in a norm makes every answer of the model empty.
    """
    small = [t for t in checkpoint.tensors.values() if t.nbytes <= SMALL and _dtype(t) in _NON_FINITE]
    findings = Findings("values")
    for tensor, count in find_non_finite(small):
        findings.add(
            f"NaN or Inf in {count:,} of {math.prod(tensor.shape):,} values",
            tensor.file,
            "finite values",
            "check the files with `kimi-w4a8 fetch --verify`; if they are right, do not use this checkpoint",
            tensor.name,
        )
    return findings.problems(), len(small)


def find_non_finite(tensors: Iterable[TensorInfo]) -> list[tuple[TensorInfo, int]]:
    """Return the tensors that contain NaN or Inf, with the number of such values.

    Files are read in parallel, each in the order of its data.
    """
    groups: dict[str, list[TensorInfo]] = {}
    for tensor in sorted(tensors, key=lambda tensor: tensor.start):
        groups.setdefault(str(tensor.file), []).append(tensor)
    with ThreadPoolExecutor(_READERS) as pool:
        return [found for group in pool.map(_non_finite_in_file, groups.values()) for found in group]


def _non_finite_in_file(tensors: list[TensorInfo]) -> list[tuple[TensorInfo, int]]:
    found = []
    with tensors[0].file.open("rb") as file:
        for tensor in tensors:
            integer, ones = _NON_FINITE[_dtype(tensor)]
            values = np.frombuffer(os.pread(file.fileno(), tensor.nbytes, tensor.start), integer)
            if count := int(np.count_nonzero((values & ones) == ones)):
                found.append((tensor, count))
    return found


def _dtype(tensor: TensorInfo) -> str:
    """Return the dtype of a tensor; Quark stores E8M0 scales as plain bytes."""
    return "F8_E8M0" if tensor.dtype == "U8" and tensor.name.endswith(".weight_scale") else tensor.dtype

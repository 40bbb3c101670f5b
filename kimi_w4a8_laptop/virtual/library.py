"""The compiled device (`device.cpp`), built on first use, and its C functions."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from kimi_w4a8_eagle3.base.errors import KimiError

DRAW = "KIMI_VIRTUAL_DRAW"  # "reference": numpy draws, as on a CPU, because the interpreter takes 50 ms a row
SOURCE = Path(__file__).with_name("device.cpp")
_SIZE = 1 << 20  # bytes of a report


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def folder() -> Path:
    """Return the folder of what is built once."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kimi-w4a8"


@functools.cache
def load() -> ctypes.CDLL:
    """Build the device if needed, load it into torch, and return its C functions."""
    path = _built()
    torch.ops.load_library(str(path))
    library = ctypes.CDLL(str(path))
    library.vg_record.restype = ctypes.c_int64
    library.vg_synchronize.restype = library.vg_capturing.restype = library.vg_holds.restype = ctypes.c_bool
    return library


def _built() -> Path:
    """Return the shared object for this source, compiler and torch."""
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    path = folder() / f"virtual-device-{key}.so"
    if path.exists():
        return path
    cxx = compiler()
    if cxx is None:
        raise KimiError("the virtual node needs a C++ compiler", remedy="install g++, or name one in CXX")
    folder().mkdir(parents=True, exist_ok=True)
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=folder()) as scratch:
        out = Path(scratch) / path.name
        includes = [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
        command = [cxx, "-O1", "-std=c++20", "-fPIC", "-shared", "-w", *includes, str(SOURCE)]
        command += [f"-L{root}/lib", "-lc10", "-ltorch_cpu", "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise KimiError(f"{SOURCE.name} does not compile with {cxx}: {done.stderr[-2000:]}")
        out.replace(path)
    return path


def report() -> dict[str, dict[str, int]]:
    """Return what was counted since `reset`: numbers by operator for each kind."""
    buffer = ctypes.create_string_buffer(_SIZE)
    load().vg_report(buffer, ctypes.c_size_t(_SIZE))
    counted: dict[str, dict[str, int]] = {}
    for line in buffer.value.decode().splitlines():
        kind, name, number = line.split("\t")
        counted.setdefault(kind, {})[name] = int(number)
    return counted


def reset() -> None:
    load().vg_reset()

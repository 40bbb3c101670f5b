"""A GPU of which only the chip is missing: launches that the host code makes through HIP run in the gfx942 interpreter.

`hip_standin.c`, built here, is this process's libamdhip64. A launch names a code object; the interpreter runs the
assembly that assembles to the same machine code. Pointers are addresses of this process: kernels may touch what torch
allocated inside of `with gpu:` and what was `put` there, and nothing else.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

import numpy as np
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton._C.libtriton import amd
from triton.backends.amd.compiler import assemble_amdgcn

from proof.gfx942 import Buffer, Gfx942Device, Kernel, MachineError, Memory

HEADERS = Path(triton.__file__).parent / "backends" / "amd" / "include"  # HIP's, as AMD publishes them
LAUNCH_FAILURE = 719  # hipErrorLaunchFailure
_Dimensions = ctypes.POINTER(ctypes.c_uint * 3)
_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, _Dimensions, _Dimensions,
    ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t,
)  # fmt: skip


@cache
def load_library() -> ctypes.CDLL:
    """Build the stand-in and load it, once a process."""
    folder = TemporaryDirectory(prefix="hip-standin-")
    target = Path(folder.name) / "libamdhip64.so.7"
    flags = ["-std=c11", "-Wall", "-Werror", "-shared", "-fPIC", "-D__HIP_PLATFORM_AMD__", "-isystem", str(HEADERS)]
    source = str(Path(__file__).with_suffix(".c"))
    subprocess.run(["gcc", *flags, "-o", str(target), source], check=True)
    library = ctypes.CDLL(str(target))
    library.folder = folder  # until the process ends
    return library


@cache
def code_object(text: str) -> bytes:
    """gfx942 assembly as an image that HIP loads."""
    with TemporaryDirectory(prefix="code-object-") as folder:
        assembled, linked = Path(folder) / "o", Path(folder) / "co"
        assembled.write_bytes(assemble_amdgcn(text, "gfx942", ""))
        amd.link_hsaco(str(assembled), str(linked))
        return linked.read_bytes()


def _identity(image: bytes) -> tuple[bytes, bytes]:
    """Machine code and metadata (arguments, LDS, registers) of an ELF file: what makes a kernel what it is."""
    (headers,) = struct.unpack_from("<Q", image, 40)
    _, count, names = struct.unpack_from("<HHH", image, 58)
    sections = [struct.unpack_from("<IIQQQQ", image, headers + 64 * number) for number in range(count)]
    start = sections[names][4]
    found = {
        image[start + name : image.index(b"\0", start + name)]: image[offset : offset + size]
        for name, _, _, _, offset, size in sections
    }
    return found[b".text"], found[b".note"]


@cache
def _assembled(text: str) -> tuple[bytes, bytes]:
    return _identity(assemble_amdgcn(text, "gfx942", ""))


@dataclass(frozen=True)
class Launch:
    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    lds_bytes: int
    stream: int
    arguments: bytes


class InterpretedGpu(TorchDispatchMode):
    """`launches` ran; `error` is what the interpreter said of the last one that it refused."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.error: Exception | None = None
        self._memory = Memory()
        self._kernels: dict[tuple[bytes, bytes], Kernel] = {}
        self._buffers: dict[int, tuple[Buffer, Any]] = {}  # by address; the storage, so that no address comes twice
        self._queue = Lock()  # one launch after another; the arguments of a waiting launch are read later
        self._callback = _Callback(self._launch)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler, for seconds, to keep it away from here

    def knows(self, text: str, kernel: Kernel) -> None:
        """Run code objects with the machine code of this assembly as `kernel`, which was parsed from it."""
        self._kernels[_assembled(text)] = kernel

    def put(self, *tensors: torch.Tensor) -> None:
        """Let kernels access tensors that were made outside."""
        for tensor in tensors:
            self._see(tensor, written=True, mutated=False)

    def __enter__(self) -> InterpretedGpu:
        load_library().standin_on_launch(self._callback)
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor, written="empty" not in func.name(), mutated=func._schema.is_mutable)
        return result

    def _see(self, tensor: torch.Tensor, written: bool, mutated: bool) -> None:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address in self._buffers:
            if mutated:
                self._memory.host_wrote(self._buffers[address][0])
        elif size:
            array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
            name = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            self._buffers[address] = self._memory.share(array, name, written), storage

    def _launch(
        self, image: int, length: int, name: bytes, grid: Any, block: Any, lds: int, stream: Any, at: int, size: int
    ) -> int:
        with self._queue:
            arguments = ctypes.string_at(at, size)
            launch = Launch(name.decode(), tuple(grid[0]), tuple(block[0]), lds, stream or 0, arguments)
            try:
                self._run(self._kernels.get(_identity(ctypes.string_at(image, length))), launch)
            except Exception as error:
                self.error = error
                return LAUNCH_FAILURE
            self.launches.append(launch)
            return 0

    def _run(self, kernel: Kernel | None, launch: Launch) -> None:
        if kernel is None or kernel.name != launch.kernel:
            raise MachineError(f"the stand-in has no assembly of this code object's {launch.kernel}")
        Gfx942Device(self._memory).launch(
            kernel, launch.grid, launch.block, launch.arguments, lds_bytes=launch.lds_bytes
        )

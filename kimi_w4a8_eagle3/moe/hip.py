"""HIP's module API over ctypes: load a code object on a device, find a kernel in it, launch it on a stream.

A launch is a single `hipModuleLaunchKernel`, so a stream that is being captured records it. Launches share no buffer,
so any number of threads may launch the same kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path

from ..base.errors import KimiError

NAMES = ("libamdhip64.so.7", "libamdhip64.so.6")  # ROCm 7 and 6, for a process that has loaded neither yet

_HANDLE, _INT, _UNSIGNED = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
_SIGNATURES = {  # each returns a hipError_t
    "hipGetDevice": (ctypes.POINTER(_INT),),
    "hipSetDevice": (_INT,),
    "hipModuleLoadData": (ctypes.POINTER(_HANDLE), ctypes.c_char_p),
    "hipModuleGetFunction": (ctypes.POINTER(_HANDLE), _HANDLE, ctypes.c_char_p),
    # function, grid, block, bytes of dynamic LDS, stream, kernelParams, extra
    "hipModuleLaunchKernel": (_HANDLE, *[_UNSIGNED] * 7, _HANDLE, _HANDLE, _HANDLE),
}


class _Extra(ctypes.Structure):
    """Five pointers of `extra`: a marker, the arguments' bytes, a marker, the address of their size, an end marker."""

    _fields_ = [
        ("buffer_pointer", ctypes.c_void_p),
        ("arguments", ctypes.c_char_p),  # takes a bytes object and passes the address of its bytes: no copy
        ("buffer_size", ctypes.c_void_p),
        ("size", ctypes.c_void_p),
        ("end", ctypes.c_void_p),
    ]


_BUFFER_POINTER, _BUFFER_SIZE, _END = 1, 2, 3


class Hip:
    """The HIP runtime in `library`. Use `Hip.of_process()` to get one."""

    def __init__(self, library: str) -> None:
        self.library = library
        try:
            self.calls = ctypes.CDLL(library)
            for name, arguments in _SIGNATURES.items():
                getattr(self.calls, name).argtypes = arguments
            self.calls.hipGetErrorName.argtypes, self.calls.hipGetErrorName.restype = (_INT,), ctypes.c_char_p
        except (OSError, AttributeError) as error:
            raise KimiError(f"no HIP runtime: {error}", where=library, expected="a ROCm build of torch") from error

    @classmethod
    @cache
    def of_process(cls) -> Hip:
        """Return the runtime that this process has loaded, or else ROCm's.

        Streams belong to one runtime, so torch's must be used where it is loaded. Raises KimiError when there is none.
        """
        found = loaded_library()
        if found:
            return cls(found)
        try:
            return cls(NAMES[0])
        except KimiError:
            return cls(NAMES[1])

    def load(self, image: bytes, name: str, device: int) -> Function:
        """Load a code object on a device until the process ends, and return its kernel of this name.

        Raises KimiError with HIP's error, such as hipErrorNoBinaryForGpu, or hipErrorNotFound for another name.
        """
        module, function = _HANDLE(), _HANDLE()
        with self.on_device(device):  # HIP 6 aborts the process when it is asked for a kernel of another device
            self.check(self.calls.hipModuleLoadData(module, image), f"loading a code object on GPU {device}")
            status = self.calls.hipModuleGetFunction(function, module, name.encode())
        self.check(status, f"finding the kernel {name} in a code object")
        return Function(self, image, name, device, function)

    @contextmanager
    def on_device(self, device: int) -> Iterator[None]:
        """Make `device` this thread's device inside the block."""
        before = _INT()
        self.check(self.calls.hipGetDevice(before), "asking for the current GPU")
        if before.value == device:
            yield
            return
        self.check(self.calls.hipSetDevice(device), f"switching to GPU {device}")
        try:
            yield
        finally:
            self.check(self.calls.hipSetDevice(before), f"switching back to GPU {before.value}")

    def check(self, status: int, doing: str) -> None:
        """Raise KimiError unless `status` is hipSuccess."""
        if status:
            raise KimiError(f"HIP error {self.calls.hipGetErrorName(status).decode()} ({status})", where=doing)


class Function:
    """A kernel of a code object that is loaded on one device."""

    def __init__(self, hip: Hip, image: bytes, name: str, device: int, handle: ctypes.c_void_p) -> None:
        self.hip, self.name, self.device, self._handle = hip, name, device, handle
        self._image = image  # HIP keeps the pointer, not a copy
        self._launch = hip.calls.hipModuleLaunchKernel

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        lds_bytes: int,
        stream: int,
        arguments: bytes,
    ) -> None:
        """Launch `grid` workgroups of `block` threads on `stream` (0: the default one) of the kernel's device.

        lds_bytes: dynamic LDS, in addition to what the kernel declares.
        arguments: the explicit part of the kernarg segment, laid out as the kernel's metadata says.

        Raises KimiError when HIP refuses the launch. An error inside the kernel shows later, at a synchronisation.
        """
        size = ctypes.c_size_t(len(arguments))
        extra = _Extra(_BUFFER_POINTER, arguments, _BUFFER_SIZE, ctypes.addressof(size), _END)
        # The default stream belongs to the current device; every other stream knows its own device.
        with nullcontext() if stream else self.hip.on_device(self.device):
            status = self._launch(self._handle, *grid, *block, lds_bytes, stream, None, ctypes.byref(extra))
        if status:
            self.hip.check(status, f"launching {self.name}, grid {grid}, block {block}")


def loaded_library() -> str | None:
    """Return the path of the libamdhip64 that this process has mapped, or None."""
    mapped = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    paths = [fields[5] for fields in mapped if len(fields) == 6]
    return next((path for path in paths if Path(path).name.startswith("libamdhip64.so")), None)

"""The kernels as code objects: the manifest that names them, and their launches through HIP's module API.

`kimi-w4a8 warm` writes a folder of them where FlyDSL is installed; a server reads the folder and needs no compiler. A
kernel's key in the manifest is the `repr` of its configuration. Before anything is launched, the kernel sources of this
package, the architecture and the SHA-256 of every object are compared with the manifest.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...base.errors import KimiError
from ..contract import GateReader
from ..hip import Function, Hip

if TYPE_CHECKING:
    from .configs import KernelConfig

ARCH = "gfx942"
GATE = "KIMI_KERNELS"
MANIFEST = "manifest.json"
# Modules that run on the host. A change of any other module of this folder or of `kernels/` may change a kernel.
_HOST = ("__init__", "backend", "candidates", "code_object", "objects", "toolchain", "warm")
_FORMATS = {8: "Q", 4: "i"}  # an address, a count


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CodeObject(_Model):
    """One compiled kernel.

    arguments: (offset, bytes) of each argument that the host passes; the rest of the kernarg segment is zero.
    block: threads.
    """

    file: str = Field(pattern=r"^[\w-]+\.co$")
    sha256: str
    symbol: str
    arguments: tuple[tuple[int, int], ...]
    kernarg_bytes: int
    block: tuple[int, int, int]
    spills: int


class KernelManifest(_Model):
    """Contents of a folder of code objects, with their compilers, sources and GPU.

    remaining: kernels that an interrupted `kimi-w4a8 warm` has not compiled yet.
    """

    arch: str = ARCH
    sources: str
    compilers: dict[str, str] = {}
    remaining: int = 0
    kernels: dict[str, CodeObject] = {}


@cache
def source_hash() -> str:
    """Return the SHA-256 of the sources that a kernel's machine code depends on."""
    digest = hashlib.sha256()
    for path in sorted(path for path in Path(__file__).parent.rglob("*.py") if path.stem not in _HOST):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def cache_dir() -> Path:
    """Return this package's cache of compiled files, below $XDG_CACHE_HOME or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "kimi-w4a8-eagle3"


def objects_folder(gates: GateReader) -> Path:
    """Return the folder of the code objects: KIMI_KERNELS, or one below `cache_dir`."""
    given = gates.get(GATE)
    return Path(given) if given else cache_dir() / "kernels"


def read_manifest(folder: Path) -> KernelManifest:
    """Return the manifest of a folder; raise KimiError when it cannot be read."""
    path = folder / MANIFEST
    try:
        return KernelManifest.model_validate_json(path.read_bytes())
    except OSError as error:
        raise _refused(folder, f"there are no code objects of the MoE kernels in {folder} ({error.strerror})") from None
    except ValidationError as error:
        raise _refused(folder, f"{path} cannot be read: {error.errors()[0]['msg']}") from None


class _Loaded(NamedTuple):
    function: Function
    arguments: struct.Struct
    block: tuple[int, int, int]


class CodeObjects:
    """The kernels of one folder, loaded on a device at their first use there.

    Raises KimiError when the folder has none, or those of another GPU or of other sources than this package's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self._loaded: dict[tuple[KernelConfig, int], _Loaded] = {}
        if self.manifest.arch != ARCH:
            raise _refused(folder, f"the code objects are for {self.manifest.arch}, not {ARCH}")
        if self.manifest.sources != source_hash():
            raise _refused(folder, "the code objects were compiled from other kernel sources than this package's")

    def image(self, key: str) -> bytes:
        """Return the code object of a kernel; raise KimiError when it is missing or altered."""
        found = self.manifest.kernels.get(key)
        if found is None:
            raise _refused(
                self.folder,
                f"there is no code object of {key}",
                "; for another model add --recipe, or --model, --tp and --ep",
            )
        image = self.intact(found)
        if image is None:
            raise _refused(self.folder, f"{found.file}, the code object of {key}, was altered or removed")
        return image

    def intact(self, found: CodeObject) -> bytes | None:
        """Return an object of the manifest as it was compiled, or None when the file is missing or differs."""
        try:
            image = (self.folder / found.file).read_bytes()
        except OSError:
            return None
        return image if hashlib.sha256(image).hexdigest() == found.sha256 else None

    def check_all(self) -> int:
        """Return the number of kernels; raise KimiError for a damaged one, and after an interrupted `warm`."""
        if self.manifest.remaining:
            raise _refused(self.folder, f"{self.manifest.remaining} kernels are missing: `warm` was interrupted")
        self.check(self.manifest.kernels)
        return len(self.manifest.kernels)

    def check(self, keys: Iterable[str]) -> None:
        """Raise KimiError unless every one of these kernels is present and intact."""
        for key in keys:
            self.image(key)

    def load(self, config: KernelConfig, device: int) -> _Loaded:
        """Load a kernel on a device, once and not during a graph capture; raise KimiError as `image` does."""
        if (config, device) not in self._loaded:
            image, found = self.image(repr(config)), self.manifest.kernels[repr(config)]
            function = Hip.of_process().load(image, found.symbol, device)
            self._loaded[config, device] = _Loaded(function, _packing(found), found.block)
        return self._loaded[config, device]

    def launch(self, config: KernelConfig, count: Any, device: int, stream: int, arguments: tuple[int, ...]) -> None:
        """Launch a kernel for `count`, which `KernelConfig.grid` takes."""
        kernel = self._loaded.get((config, device)) or self.load(config, device)
        packed = kernel.arguments.pack(*arguments)
        kernel.function.launch(config.grid(count), kernel.block, 0, stream, packed)


@lru_cache(maxsize=4)
def code_objects(folder: Path) -> CodeObjects:
    """Return the kernels of a folder, which every layer of a process shares."""
    return CodeObjects(folder)


def _packing(found: CodeObject) -> struct.Struct:
    """Return the format that packs the host's arguments into the kernarg segment."""
    text, end = "<", 0
    for offset, size in found.arguments:
        text += f"{offset - end}x{_FORMATS[size]}"
        end = offset + size
    return struct.Struct(f"{text}{found.kernarg_bytes - end}x")


def _refused(folder: Path, problem: str, more: str = "") -> KimiError:
    remedy = f"kimi-w4a8 warm --objects {folder} (where FlyDSL is installed{more})"
    return KimiError(
        problem, where=str(folder / MANIFEST), expected="code objects that `kimi-w4a8 warm` wrote", remedy=remedy
    )

"""Compile FlyDSL kernels to gfx942 without a GPU.

FlyDSL links with `$ROCM_PATH/llvm/bin/ld.lld`. The linker of the package `ziglang` (extra `kernels`) comes first, so
that every machine links alike, then ROCm's own, then Debian's. They are called through a private folder, laid
out like ROCm's.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ....base.errors import KimiError
from ....base.installed import require
from ....base.next_step import pip_install
from ..configs import KernelConfig
from ..objects import ARCH, CodeObject, cache_dir
from .code_object import describe

SUPPORTED = ("0.4.2", "0.5.0")  # the kernels use FlyDSL's MLIR bindings, which releases change
LINKERS = ("ld.lld-19", "ld.lld-20", "ld.lld-21")  # lld 16 rejects the code objects ("unknown abi version")
DEFAULT_ROCM = Path("/opt/rocm")


def flydsl_version() -> str:
    """Return FlyDSL's version; raise KimiError if it is missing or another than the kernels are written for."""
    require("flydsl")
    version = metadata.version("flydsl")
    if version not in SUPPORTED:
        raise KimiError(
            f"flydsl {version} is not supported",
            where="compiling the gfx942 kernels",
            expected=f"flydsl {', '.join(SUPPORTED)} (a machine that only serves needs none)",
            remedy="in a checkout, and an environment without AITER: " + pip_install("-e", "'.[kernels,serve]'"),
        )
    return version


def _linker() -> list[str]:
    """Return the command of the preferred linker, empty if there is none."""
    package = find_spec("ziglang")
    for folder in (package and package.submodule_search_locations) or []:
        if (zig := Path(folder) / "zig").is_file():
            return [str(zig), "ld.lld"]
    rocm = Path(os.environ.get("ROCM_PATH") or DEFAULT_ROCM) / "llvm" / "bin" / "ld.lld"
    return [path for name in (str(rocm), *LINKERS) if (path := shutil.which(name))][:1]


def rocm_path() -> Path:
    """Return a private folder whose llvm/bin/ld.lld is a script that calls a linker; raise KimiError without one."""
    command = _linker()
    if not command:
        raise KimiError(
            "no linker for the gfx942 kernels",
            expected="package ziglang (extra `kernels`), ROCm's llvm/bin/ld.lld or Debian's ld.lld-19",
            remedy="in a checkout of this package: " + pip_install("-e", "'.[kernels]'"),
        )
    script = f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n'
    folder = cache_dir() / "rocm" / hashlib.sha256(script.encode()).hexdigest()[:16]
    linker = folder / "llvm" / "bin" / "ld.lld"
    if not linker.is_file():
        linker.parent.mkdir(parents=True, exist_ok=True)
        fresh = linker.with_name(f"ld.lld.{os.getpid()}")
        fresh.write_text(script)
        fresh.chmod(0o755)
        fresh.replace(linker)
    return folder


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set environment variables inside the block: FlyDSL takes its options from the environment only."""
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        os.environ.update(before)


def compile_kernel(config: KernelConfig) -> tuple[bytes, CodeObject]:
    """Return (the code object, its manifest entry)."""
    from .launcher import launcher_of  # optional: flydsl, whose absence this module reports

    launcher = launcher_of(config)
    image = compiled(launcher)
    return image, describe(image, len(inspect.signature(launcher.func).parameters))


def compiled(launcher: Any) -> bytes:
    """Return the gfx942 code object of the one kernel that a launcher launches."""
    from flydsl._mlir import ir  # as in compile_kernel
    from flydsl._mlir.dialects import gpu  # as in compile_kernel
    from flydsl.compiler.jit_function import _create_mlir_context  # as in compile_kernel

    count = len(inspect.signature(launcher.func).parameters)
    options = {"COMPILE_ONLY": "1", "ARCH": ARCH, "FLYDSL_RUNTIME_ENABLE_CACHE": "0"}
    with environment(**options, ROCM_PATH=str(rocm_path())):  # where FlyDSL looks for a linker
        launcher(*range(1, count + 1))
    with _create_mlir_context():
        module = ir.Module.parse(launcher._last_compiled[1].ir)
        [binary] = [op.operation for op in module.body.operations if op.operation.name == "gpu.binary"]
        image: bytes = gpu.ObjectAttr(ir.ArrayAttr(binary.attributes["objects"])[0]).object
    return image


def compilers() -> dict[str, str]:
    """Return the versions of the compilers; raise KimiError when one is missing."""
    flydsl = flydsl_version()
    linker = [str(rocm_path() / "llvm" / "bin" / "ld.lld"), "--version"]
    version = subprocess.run(linker, capture_output=True, text=True, check=True).stdout.strip()
    return {"flydsl": flydsl, "linker": version}

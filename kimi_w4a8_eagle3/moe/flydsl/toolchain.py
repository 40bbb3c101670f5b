"""Compile FlyDSL kernels to gfx942 without a GPU.

FlyDSL links with `$ROCM_PATH/llvm/bin/ld.lld`. The linker of the package `ziglang` (extra `kernels`) comes first, so
that every machine links alike, then ROCm's own, then Debian's; all but ROCm's through a private folder like ROCm's.
Compiled code is cached under a key of kernel sources, FlyDSL version, target and configuration.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...base.errors import KimiError

ARCH = "gfx942"
SUPPORTED = ("0.4.2",)  # the kernels use FlyDSL's MLIR bindings, which releases change
LINKERS = ("ld.lld-19", "ld.lld-20", "ld.lld-21")  # lld 16 rejects the code objects ("unknown abi version")
DEFAULT_ROCM = Path("/opt/rocm")


def cache_dir() -> Path:
    """Where compiled code lives: $XDG_CACHE_HOME or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "kimi-w4a8-eagle3" / "flydsl"


def flydsl_problem() -> str | None:
    """Why FlyDSL cannot be used, or None."""
    try:
        version = metadata.version("flydsl")
    except metadata.PackageNotFoundError:
        return "the package flydsl is not installed (extra `kernels`)"
    if version not in SUPPORTED:
        return f"flydsl {version} is not supported, the kernels are written for {', '.join(SUPPORTED)}"
    return None


def linker_problem() -> str | None:
    """Why compiled kernels cannot be linked, or None."""
    if _wheel_linker() or _rocm_linker() or _debian_linker():
        return None
    return "no linker: package ziglang (extra `kernels`), ROCm's llvm/bin/ld.lld and Debian's ld.lld-19 are all missing"


def _wheel_linker() -> list[str] | None:
    package = find_spec("ziglang")
    folders = (package and package.submodule_search_locations) or []
    return next(([str(zig), "ld.lld"] for folder in folders if (zig := Path(folder) / "zig").is_file()), None)


def _rocm_linker() -> Path | None:
    linker = Path(os.environ.get("ROCM_PATH") or DEFAULT_ROCM) / "llvm" / "bin" / "ld.lld"
    return linker if linker.is_file() else None


def _debian_linker() -> list[str] | None:
    return next(([found] for name in LINKERS if (found := shutil.which(name))), None)


def rocm_path() -> Path:
    """A folder with llvm/bin/ld.lld: ROCm itself, or a private one whose linker is a script that calls another.

    Raises KimiError when there is no linker.
    """
    rocm = _rocm_linker()
    command = _wheel_linker() or (None if rocm else _debian_linker())
    if command:
        return _private_rocm(command)
    if rocm:
        return rocm.parents[2]
    raise KimiError(
        str(linker_problem()), where="compiling FlyDSL kernels", remedy="pip install 'kimi-w4a8-eagle3[kernels]'"
    )


def _private_rocm(command: list[str]) -> Path:
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
    """Variables that are set inside: FlyDSL takes its options from the environment only."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def linking() -> Iterator[None]:
    """Inside, FlyDSL finds a linker."""
    with environment(ROCM_PATH=str(rocm_path())):
        yield


def sources() -> list[Path]:
    """What a kernel's machine code may depend on: every module of this folder."""
    return sorted(Path(__file__).parent.glob("*.py"))


@lru_cache(maxsize=1)
def source_key() -> str:
    """Identifies the kernel sources, the FlyDSL version and the target."""
    digest = hashlib.sha256(f"{metadata.version('flydsl')} {ARCH}".encode())
    for path in sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def cache_tag(config: Any) -> str:
    """Distinguishes configurations in FlyDSL's own disk cache, whose key holds only a closure's scalars."""
    return f"{source_key()} {config!r}"


def compile_and_launch(launcher: Any, args: tuple[Any, ...]) -> Callable[..., Any]:
    """Launch a kernel for the first time, compiling it or loading it from FlyDSL's cache; returns its fast launcher."""
    import flydsl.compiler as flyc  # optional: flydsl

    with linking(), environment(ARCH=ARCH, FLYDSL_RUNTIME_CACHE_DIR=str(cache_dir() / "jit")):
        compiled: Callable[..., Any] = flyc.compile(launcher, *args)
    return compiled


def compile_ahead(launcher: Any) -> None:
    """Compile into FlyDSL's cache, from which `compile_and_launch` takes it; needs no GPU."""
    count = len([p for p in inspect.signature(launcher.func).parameters if p != "stream"])
    options = {"COMPILE_ONLY": "1", "ARCH": ARCH, "FLYDSL_RUNTIME_CACHE_DIR": str(cache_dir() / "jit")}
    with environment(**options), linking():
        launcher(*range(1, count + 1))

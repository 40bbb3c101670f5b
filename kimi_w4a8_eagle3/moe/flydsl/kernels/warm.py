"""Compile code objects into a folder: intact objects stay, and every finished kernel is kept."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ....base.errors import KimiError
from ....base.files import write_atomic
from ..configs import KernelConfig
from ..objects import MANIFEST, CodeObject, CodeObjects, KernelManifest, source_hash
from .toolchain import compile_kernel, compilers

MOST_JOBS = 16  # one compiler process takes 0.7 GB
Watch = Callable[[Iterable[Any], int], Iterable[Any]]  # (items, their number) -> the same items, with progress shown


def warm(configs: Iterable[KernelConfig], folder: Path, jobs: int, watch: Watch) -> tuple[KernelManifest, int]:
    """Compile what the folder lacks, in the order of `configs`; return (its manifest, number of compiled kernels).

    jobs: compiler processes; 0 is one a usable core, at most MOST_JOBS. Raises KimiError when a kernel does not
    compile, or when compilers are needed that are not installed.
    """
    wanted, jobs = list(dict.fromkeys(configs)), jobs or min(len(os.sched_getaffinity(0)), MOST_JOBS)
    manifest, missing = _lacking(wanted, folder)
    if not missing:  # works in a read-only folder without compilers too
        return manifest, 0
    with _alone(folder):
        manifest, missing = _lacking(wanted, folder)
        versions = compilers()
        if versions != manifest.compilers:
            manifest, missing = KernelManifest(sources=source_hash(), compilers=versions), wanted
        for left, (key, image, compiled) in zip(
            reversed(range(len(missing))), _compile(missing, jobs, watch), strict=True
        ):
            write_atomic(folder / compiled.file, image)
            kernels = {**manifest.kernels, key: compiled}
            manifest = manifest.model_copy(update={"kernels": kernels, "remaining": left})
            write_atomic(folder / MANIFEST, manifest.model_dump_json(indent=1) + "\n")
        for name in {path.name for path in folder.glob("*.co")} - {found.file for found in manifest.kernels.values()}:
            (folder / name).unlink()
    return manifest, len(missing)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock the folder, so that no other process writes to it inside the block."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
    except BlockingIOError:
        raise KimiError(
            "another `kimi-w4a8 warm` writes to this folder", where=str(folder), remedy="wait until it has finished"
        ) from None
    except OSError as error:
        raise KimiError(
            f"the code objects cannot be written: {error}",
            where=str(folder),
            remedy="use another folder: --objects",
        ) from error


def _lacking(wanted: list[KernelConfig], folder: Path) -> tuple[KernelManifest, list[KernelConfig]]:
    """Return (manifest of the intact objects of this package's sources, those of `wanted` that it lacks)."""
    try:
        objects = CodeObjects(folder)
    except KimiError:
        return KernelManifest(sources=source_hash()), wanted
    kernels = {key: found for key, found in objects.manifest.kernels.items() if objects.intact(found)}
    manifest = objects.manifest.model_copy(update={"kernels": kernels})
    return manifest, [config for config in wanted if repr(config) not in kernels]


def _compile(configs: list[KernelConfig], jobs: int, watch: Watch) -> Iterator[tuple[str, bytes, CodeObject]]:
    """Yield (key, code object, entry) of each kernel as it is finished, from `jobs` processes."""
    context = multiprocessing.get_context("spawn")  # a fork would inherit locks of torch's threads
    pool = ProcessPoolExecutor(max(min(jobs, len(configs)), 1), context, signal.signal, (signal.SIGINT, signal.SIG_IGN))
    try:
        started: dict[Future[Any], KernelConfig] = {pool.submit(compile_kernel, config): config for config in configs}
        for future in watch(as_completed(started), len(started)):
            config = started[future]
            try:
                yield repr(config), *future.result()
            except BrokenProcessPool:
                raise KimiError(
                    "a compiler process was killed",
                    where=repr(config),
                    remedy="run with --jobs 1, which takes less memory",
                ) from None
            except KimiError:
                raise
            except Exception as error:  # compilers raise their own types
                raise KimiError(f"{config!r} does not compile: {error}", where="kimi-w4a8 warm") from error
    finally:
        pool.shutdown(cancel_futures=True)

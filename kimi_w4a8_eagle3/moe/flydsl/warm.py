"""Compile ahead what the FlyDSL backend launches under given gates; needs no GPU."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from ...base.errors import KimiError
from ..contract import GateReader, MoeShape
from ..routing import ROUTE_IN_KERNEL
from ..tiles import buckets
from . import toolchain as toolchain
from .backend import Builder, FlydslBackend


def wanted_kernels(backend: FlydslBackend, shape: MoeShape) -> dict[Any, Builder]:
    """Configuration -> builder of every kernel that some batch launches."""
    return {c: build for tokens in buckets(backend.name) for build, c in backend.configs(shape, tokens).values()}


def wanted_routes(backend: FlydslBackend, shape: MoeShape) -> set[tuple[int, int]]:
    """(slots, rows a block) of every batch that the sorting kernel routes."""
    return {
        (tokens * shape.top_k, backend.configs(shape, tokens)["stage1"][1].tile_m)
        for tokens in range(1, ROUTE_IN_KERNEL // shape.top_k + 1)
    }


def compile_kernel(build: Builder, config: Any) -> None:
    """Compile one kernel into FlyDSL's cache."""
    toolchain.compile_ahead(build(config))


def warm(shape: MoeShape, arch: str, gates: GateReader | None = None) -> int:
    """Compile every kernel that a server with these gates can ask for. Returns how many."""
    if arch != toolchain.ARCH:
        raise _refused(f"the FlyDSL kernels are for {toolchain.ARCH}, not {arch}")
    backend = FlydslBackend(gates)
    problem = toolchain.flydsl_problem() or toolchain.linker_problem() or backend.shape_problem(shape)
    if problem:
        raise _refused(problem)
    kernels = wanted_kernels(backend, shape)
    for config, build in kernels.items():
        compile_kernel(build, config)
    if not find_spec("triton"):
        return len(kernels)
    from .route_slots import compile_routes  # it loads Triton

    return len(kernels) + compile_routes(shape.num_experts, wanted_routes(backend, shape))


def _refused(problem: str) -> KimiError:
    return KimiError(problem, where="kimi warm", expected=f"FlyDSL and a shape that it runs on {toolchain.ARCH}")

"""Compile a kernel to a gfx942 code object; needs no GPU."""

from __future__ import annotations

import inspect
from typing import Any

from . import toolchain as toolchain
from .code_object import describe
from .configs import (
    ByTokenConfig,
    KernelConfig,
    ReduceConfig,
    RouteConfig,
    Stage1Config,
    Stage2Config,
    W4A16Config,
)
from .objects import CodeObject


def launcher_of(config: KernelConfig) -> Any:
    """Build the launcher of a kernel, which FlyDSL compiles."""
    # FlyDSL takes a second to import, and this module is also imported where nothing is compiled.
    from . import rows, sort_slots, stage1, stage2, stage2_token, w4a16

    builders: dict[type, Any] = {
        Stage1Config: stage1.build,
        Stage2Config: stage2.build,
        ByTokenConfig: stage2_token.build,
        ReduceConfig: rows.build_reduce,
        RouteConfig: sort_slots.build,
        W4A16Config: w4a16.build,
    }
    return builders[type(config)](config)


def compile_kernel(config: KernelConfig) -> tuple[bytes, CodeObject]:
    """Return (the code object, its manifest entry)."""
    launcher = launcher_of(config)
    image = toolchain.compiled(launcher)
    return image, describe(image, len(inspect.signature(launcher.func).parameters))

"""The kernels by their configurations: names, parameters and the workgroups that emit them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from inspect import Parameter, Signature
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from .. import kernel_arguments as arguments
from ..configs import (
    WAVES,
    ByTokenConfig,
    KernelConfig,
    ReduceConfig,
    RouteConfig,
    Stage1Config,
    Stage2Config,
    W4A16Config,
)
from . import ops as ops
from .block import Stage1Workgroup
from .rows import Reduce
from .sort_slots import Route
from .stage1_decode import Stage1Decode
from .stage1_prefill import Stage1Prefill
from .stage1_small import Stage1Small
from .stage2 import Stage2
from .stage2_quantize import Stage2Decode, Stage2Prefill, Stage2Small
from .stage2_token import Stage2Token
from .w4a16 import W4A16


def stage1_kind(cfg: Stage1Config) -> type[Stage1Workgroup]:
    return (Stage1Small if cfg.experts else Stage1Decode) if cfg.decode else Stage1Prefill


def stage2_kind(cfg: Stage2Config) -> type[Stage2]:
    return Stage2Prefill if cfg.keeps else Stage2Small if cfg.short else Stage2Decode


# A configuration's kernel: its name, the dataclass of its parameters, and the class of its workgroups.
KERNELS: dict[type, tuple[str, type, Callable[[Any], Any]]] = {
    RouteConfig: ("moe_route", arguments.RouteArguments, lambda cfg: Route),
    Stage1Config: ("moe_stage1", arguments.Stage1Arguments, stage1_kind),
    Stage2Config: ("moe_stage2", arguments.Stage2Arguments, stage2_kind),
    ByTokenConfig: ("moe_stage2_token", arguments.ByTokenArguments, lambda cfg: Stage2Token),
    ReduceConfig: ("moe_reduce", arguments.ReduceArguments, lambda cfg: Reduce),
    W4A16Config: ("moe_w4a16", arguments.W4A16Arguments, lambda cfg: W4A16),
}
TYPES = {"Address": fx.Int64, "Number": fx.Int32}


def launcher_of(config: KernelConfig) -> Any:
    """Return a host function that launches the kernel of a configuration; FlyDSL compiles this function."""
    name, taken, kind_of = KERNELS[type(config)]
    kind = Parameter.POSITIONAL_OR_KEYWORD
    signature = Signature([Parameter(field.name, kind, annotation=TYPES[str(field.type)]) for field in fields(taken)])

    def body(**values: Any) -> None:
        kind_of(config)(config, taken(**values)).run()

    body.__name__, body.__signature__ = name, signature  # type: ignore[attr-defined]  # FlyDSL reads both
    kernel = flyc.kernel(body, known_block_size=[WAVES * ops.WAVE, 1, 1])

    @flyc.jit
    def launch(**values: Any) -> None:
        kernel(**values).launch(block=(WAVES * ops.WAVE, 1, 1))

    launch.func.__signature__ = signature
    launch.compile_hints = config.hints
    return launch

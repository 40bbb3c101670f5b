"""The kernels by their configurations: names, parameters and the workgroups that emit them."""

from __future__ import annotations

from dataclasses import fields
from inspect import Parameter, Signature
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from . import kernel_arguments as arguments
from . import ops as ops
from .block import Workgroup
from .configs import (
    WAVES,
    ByTokenConfig,
    KernelConfig,
    ReduceConfig,
    RouteConfig,
    Stage1Config,
    Stage2Config,
    W4A16Config,
)
from .rows import Reduce
from .sort_slots import Route
from .stage1_decode import Stage1Decode
from .stage1_prefill import Stage1Prefill
from .stage1_small import Stage1Small
from .stage2 import Stage2
from .stage2_quantize import Stage2Decode, Stage2Prefill, Stage2Small
from .stage2_token import Stage2Token
from .w4a16 import W4A16


def _stage1(cfg: Stage1Config, args: arguments.Stage1Arguments) -> Workgroup:
    kind = (Stage1Small if cfg.experts else Stage1Decode) if cfg.decode else Stage1Prefill
    return kind(cfg, args)


def _stage2(cfg: Stage2Config, args: arguments.Stage2Arguments) -> Workgroup:
    if not cfg.quantize:
        return Stage2(cfg, args)
    kind = Stage2Prefill if cfg.keeps else Stage2Small if cfg.short else Stage2Decode
    return kind(cfg, args)


# A configuration's kernel: its name, the dataclass of its parameters, and what makes one workgroup of both.
KERNELS: dict[type, tuple[str, type, Any]] = {
    RouteConfig: ("moe_route", arguments.RouteArguments, Route),
    Stage1Config: ("moe_stage1", arguments.Stage1Arguments, _stage1),
    Stage2Config: ("moe_stage2", arguments.Stage2Arguments, _stage2),
    ByTokenConfig: ("moe_stage2_token", arguments.ByTokenArguments, Stage2Token),
    ReduceConfig: ("moe_reduce", arguments.ReduceArguments, Reduce),
    W4A16Config: ("moe_w4a16", arguments.W4A16Arguments, W4A16),
}
TYPES = {"Address": fx.Int64, "Number": fx.Int32}


def launcher_of(config: KernelConfig) -> Any:
    """Return a host function that launches the kernel of a configuration; FlyDSL compiles this function."""
    name, taken, workgroup = KERNELS[type(config)]
    kind = Parameter.POSITIONAL_OR_KEYWORD
    signature = Signature([Parameter(field.name, kind, annotation=TYPES[str(field.type)]) for field in fields(taken)])

    def body(**values: Any) -> None:
        workgroup(config, taken(**values)).run()

    body.__name__, body.__signature__ = name, signature  # type: ignore[attr-defined]  # FlyDSL reads both
    kernel = flyc.kernel(body, known_block_size=[WAVES * ops.WAVE, 1, 1])

    @flyc.jit
    def launch(**values: Any) -> None:
        kernel(**values).launch(block=(WAVES * ops.WAVE, 1, 1))

    launch.func.__signature__ = signature
    launch.compile_hints = config.hints
    return launch

"""`python -m proof.interpreted`: forwards of the FlyDSL backend in the gfx942 interpreter, against the reference.

Every batch runs with both tensor-parallel sizes and in its own order of waves. The blocks of random MXFP4 layers have
every shift, so their tiles need both sums.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any, cast

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.cli import run
from kimi_w4a8_eagle3.moe.contract import MoeShape, PreparedMoe
from kimi_w4a8_eagle3.moe.flydsl.backend import Count, FlydslBackend
from kimi_w4a8_eagle3.moe.flydsl.configs import KernelConfig
from kimi_w4a8_eagle3.moe.reference import ReferenceBackend
from kimi_w4a8_eagle3.moe.tune import random_batch, random_layer
from kimi_w4a8_eagle3.quark.weight_format import INT4, MXFP4

from .assembly import assembly
from .gfx942 import Kernel, Machine, Memory, parse_kernel

BATCHES = [1, 2, 8, 33, 64, 65, 160, 256, 257, 1024]
ORDERS: tuple[Any, ...] = ("reverse", random.Random(7), "lockstep", "forward")
TOLERANCE = 1.66e-3  # tests/moe/flydsl/test_flydsl_launch.py derives it
FORMATS = {weights.name.lower(): weights for weights in (INT4, MXFP4)}
CPU = torch.device("cpu")


@cache
def _parsed(config: KernelConfig) -> Kernel:
    return parse_kernel(assembly(config))


class InterpretedBackend(FlydslBackend):
    """The FlyDSL backend on host memory, its kernels executed by the interpreter."""

    def __init__(self, gates: dict[str, Any], order: Any = "reverse") -> None:
        super().__init__(gates)
        self.order = order

    def launch(self, config: KernelConfig, count: Count, passed: object) -> None:
        memory, kernel = Memory(), _parsed(cast(Any, config))
        given = [
            memory.share(_bytes(value), name, True) if isinstance(value, torch.Tensor) else value
            for name, value in vars(passed).items()
        ]
        Machine(memory).launch(kernel, config.grid(count), (256, 1, 1), given, order=self.order)


def _bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    return tensor.view(torch.uint8).view(-1).numpy()


def shape_of(weights: str, tp: int) -> MoeShape:
    """Return a layer of 12 experts with Kimi's intermediate size."""
    return MoeShape(num_experts=12, hidden=512, inter=2048 // tp, top_k=8, weights=FORMATS[weights])


@cache
def prepared(shape: MoeShape) -> tuple[PreparedMoe, PreparedMoe]:
    """Return a random layer for the reference and for FlyDSL."""
    layer = random_layer(shape, CPU)
    return ReferenceBackend().prepare(layer), FlydslBackend().prepare(layer)


def error(backend: InterpretedBackend, shape: MoeShape, tokens: int) -> float:
    """Return the relative error of one batch, of which some slots are on no rank."""
    reference, moe = prepared(shape)
    x, router, ids = random_batch(shape, tokens, CPU)
    ids[tokens // 2 :: 7, 3] = -1
    expected = ReferenceBackend().forward(x, reference, router, ids).double()
    return float((backend.forward(x, moe, router, ids).double() - expected).norm() / expected.norm())


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def forwards(
    weights: list[str] = typer.Option(list(FORMATS), "--weights", help="Formats of the weights."),
    tp: list[int] = typer.Option([8, 4], "--tp", min=1, help="Tensor-parallel sizes."),
    tokens: list[int] = typer.Option(BATCHES, "--tokens", min=1, help="Batches."),
) -> None:
    """Execute forwards in the interpreter and print their errors; an error above the derived tolerance ends the run."""
    number = 0
    for name in weights:
        for size in tp:
            for batch in tokens:
                order = ORDERS[number % len(ORDERS)]
                found = error(InterpretedBackend({}, order), shape_of(name, size), batch)
                label = order if isinstance(order, str) else "random"
                typer.echo(f"{name} tp {size} tokens {batch}: {found:.2e} ({label})")
                if not found <= TOLERANCE:
                    raise KimiError(f"the error {found:.2e} is above {TOLERANCE}", where=f"{name}, {batch} tokens")
                number += 1


if __name__ == "__main__":
    run(app)

"""`python -m proof.interpreted`: the FlyDSL backend in the gfx942 interpreter, against the contract.

Every batch runs with both tensor-parallel sizes and in its own order of waves:

- its result is the reference's within the derived tolerance,
- the sums of stages 1 and 2 are the contract's integers, bit for bit,
- up to 16 tokens have the same bits from the kernels for few and for many tokens,
- a token with NaN is NaN, and the bits of the others stay.

A layer has rows and blocks of zeros, and expert 1 has 16 rows with the largest weights and shifts. Expert 0 of an MXFP4
layer has small shifts only, expert 4 those of 2 to 5: its tiles add shifted products. Expert 2 has shifts of 0 to 11.
All other blocks have shifts of 0 to 7.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.cli import run
from kimi_w4a8_eagle3.moe.contract import MoeShape, PreparedMoe, QuarkMoeWeights
from kimi_w4a8_eagle3.moe.flydsl.backend import Extent, FlydslBackend, FlydslCall, Kernels, Tables
from kimi_w4a8_eagle3.moe.flydsl.configs import Stage2Config
from kimi_w4a8_eagle3.moe.flydsl.kernel_arguments import Stage1Arguments, Stage2Arguments
from kimi_w4a8_eagle3.moe.reference import ReferenceBackend, integers, quantize_rows
from kimi_w4a8_eagle3.quark.packing import MAX_SHIFT
from kimi_w4a8_eagle3.quark.weight_format import INT4, MXFP4
from kimi_w4a8_lab.kernels.random_layers import random_batch, random_layer

from .assembly import assembly
from .gfx942 import Gfx942Device, Kernel, Memory, parse_kernel
from .sums import sums_of

BATCHES = [0, 1, 2, 8, 33, 64, 65, 160, 256, 257, 1024]
ORDERS: tuple[Any, ...] = ("reverse", random.Random(7), "lockstep", "forward")
TOLERANCE = 1.66e-3  # tests/moe/flydsl/test_flydsl_launch.py derives it
FEW, SORTED = 16, {"AITER_FLYDSL_STAGE1_TILE_M": 16}  # most tokens of the kernel that adds the slots
UNTOUCHED = -(1 << 30)  # fills the sums of slots that no rank computes
FORMATS = {weights.name.lower(): weights for weights in (INT4, MXFP4)}
CPU = torch.device("cpu")
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # x, router weights, expert ids


@cache
def parsed(config: Any) -> Kernel:
    """Return a compiled kernel for the interpreter."""
    return parse_kernel(assembly(config))


class InterpretedBackend(FlydslBackend):
    """The FlyDSL backend on host memory, its kernels executed by the interpreter; ran: instructions of the last one."""

    def __init__(self, gates: dict[str, Any] | None = None, order: Any = "reverse") -> None:
        super().__init__(gates)
        self.order, self.ran = order, Counter[str]()

    def launch(self, config: Any, count: Extent, passed: object) -> None:
        memory, kernel = Memory(), parsed(config)
        given = [
            memory.share(_bytes(value), name, True) if isinstance(value, torch.Tensor) else value
            for name, value in vars(passed).items()
        ]
        grid = config.grid(count)
        self.ran = Gfx942Device(memory).launch(kernel, grid, (256, 1, 1), given, order=self.order)


def _bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    return tensor.view(torch.uint8).view(-1).numpy()


def shape_of(weights: str, tp: int) -> MoeShape:
    """Return a layer of 12 experts with Kimi's intermediate size."""
    return MoeShape(num_experts=12, hidden=512, inter=2048 // tp, top_k=8, weights=FORMATS[weights])


@cache
def layer_of(shape: MoeShape) -> QuarkMoeWeights:
    """Return a random layer with the experts that the module describes."""
    layer = random_layer(shape, CPU)
    for codes, scales, shifts in ((layer.w13, layer.s13, layer.shift13), (layer.w2, layer.s2, layer.shift2)):
        codes[:, 5], scales[:, 5] = 0, 0.0
        stored = codes.view(torch.uint8)
        stored[2, :, :16], stored[1, 16:32] = 0, 0x88
        if shifts is not None:
            stored[3, :, :16] = 0x88  # minus zero
            shifts[0] &= 3
            shifts[4] = (shifts[4] & 3) + 2
            stored[1, 16:32], shifts[1, 16:32, :16] = 0x77, MAX_SHIFT  # of 16 blocks: more exceed int32
            shifts[2] = torch.where(shifts[2] > 5, shifts[2] + 4, shifts[2])
            scales[1, 16:32], scales[2] = scales[1, 16:32] / 1024, scales[2] / 16
    return layer


@cache
def prepared(shape: MoeShape) -> tuple[PreparedMoe, PreparedMoe]:
    """Return the layer for the reference and for FlyDSL."""
    return ReferenceBackend().prepare(layer_of(shape)), FlydslBackend().prepare(layer_of(shape))


def batch_of(shape: MoeShape, tokens: int) -> Batch:
    """Return a batch; some slots are on no rank."""
    x, router, ids = random_batch(shape, tokens, CPU)
    ids[tokens // 2 :: 7, 3] = -1
    return x, router, ids


def error(backend: InterpretedBackend, shape: MoeShape, tokens: int) -> float:
    """Return the relative error of one batch, without the largest difference if it is one unit of bfloat16.

    A token has few large values, and one of them that is rounded the other way is more than the tolerance.
    """
    reference, moe = prepared(shape)
    x, router, ids = batch_of(shape, tokens)
    found = backend.forward(x, moe, router, ids).double().flatten()
    expected = ReferenceBackend().forward(x, reference, router, ids).double().flatten()
    if not tokens:
        return 0.0
    away = (found - expected).abs()
    worst = int(away.argmax())  # NaN, if there is one
    if away[worst] <= 2**-7 * expected[worst].abs():
        away[worst] = 0
    return float(away.norm() / expected.norm())


def check_tokens(backend: InterpretedBackend, shape: MoeShape, tokens: int) -> None:
    """Raise KimiError where NaN leaves its token, or where a token's bits depend on the kernels for its batch."""
    moe, (x, router, ids) = prepared(shape)[1], batch_of(shape, tokens)
    found, broken = backend.forward(x, moe, router, ids), tokens // 2
    if tokens <= FEW and not torch.equal(InterpretedBackend(SORTED, "lockstep").forward(x, moe, router, ids), found):
        raise KimiError("the kernels for few and for many tokens disagree", where=f"{tokens} tokens")
    x[broken, 5] = float("nan")
    after = backend.forward(x, moe, router, ids)
    if not after[broken].isnan().all():
        raise KimiError(f"token {broken} has NaN and its result is not NaN", where=f"{tokens} tokens")
    after[broken] = found[broken]
    if not torch.equal(after, found):
        raise KimiError(f"NaN in token {broken} changes others", where=f"{tokens} tokens")


def call_of(backend: InterpretedBackend, shape: MoeShape, batch: Batch, kernels: Kernels | None = None) -> FlydslCall:
    """Return a call of the layer with this shape; kernels: other ones than the backend takes for the batch."""
    x, router, ids = batch
    return FlydslCall(backend, kernels or backend.configs(shape, len(x)), x, prepared(shape)[1], router, ids)


def check_sums(call: FlydslCall) -> None:
    """Raise KimiError unless both stages' sums are the contract's integers (`sums.py`).

    The kernel that also adds the slots has no sums to read.
    """
    tables = check_stage1(call)
    if isinstance(config := call.kernels["stage2"], Stage2Config):
        check_stage2(call, tables, config)


def check_stage1(call: FlydslCall) -> Tables:
    """Check the sums of stage 1; return the tables of its rows."""
    shape, moe = call.moe.shape, call.moe
    _fill_largest(call.x, (call.ids == 1).any(1))
    rows, info, tables = call.route()
    out = torch.full((call.slots, 2 * shape.inter), UNTOUCHED, dtype=torch.int32)
    given = Stage1Arguments(rows, info, moe.w13, moe.s13, *tables, out=out, tokens=call.tokens)
    call.backend.launch(sums_of(call.kernels["stage1"]), call.blocks, given)
    _compare("stage 1", call.tokens, out, exact_sums(shape, 1, call.x.repeat_interleave(shape.top_k, 0), call.ids))
    return tables


def _fill_largest(rows: torch.Tensor, of_expert_1: torch.Tensor) -> None:
    """Make the INT8 of two rows 127 and -127: with the expert's weights they give the largest sums."""
    for row, value in zip(of_expert_1.nonzero().flatten().tolist(), (1.0, -1.0), strict=False):
        rows[row] = value


def check_stage2(call: FlydslCall, tables: Tables, config: Stage2Config) -> None:
    """Check the sums of stage 2 for rows of its own."""
    shape = call.moe.shape
    h = torch.randn(call.slots, shape.inter, generator=torch.Generator().manual_seed(call.tokens))
    _fill_largest(h, call.ids.flatten() == 1)
    found = run_stage2(call, tables, h, sums_of(config), torch.float32).slots
    _compare("stage 2", call.tokens, found, exact_sums(shape, 2, h, call.ids).float())


class Stage2Results(NamedTuple):
    """Rows of the slots, UNTOUCHED for slots on no rank; INT8 rows, if the kernel keeps them, and their info."""

    slots: torch.Tensor
    kept: torch.Tensor
    info: torch.Tensor


def run_stage2(
    call: FlydslCall, tables: Tables, h: torch.Tensor, config: Stage2Config, dtype: torch.dtype
) -> Stage2Results:
    """Run stage 2 on float32 rows in two launches, each of about half of the channels."""
    hidden, moe = call.moe.shape.hidden, call.moe
    config = replace(config, tile_n=min(config.tile_n, hidden // 2))
    kept, info = torch.zeros(h.shape, dtype=torch.int8), torch.zeros(call.slots, 2, dtype=torch.int32)
    half = hidden // 2 // config.tile_n * config.tile_n
    found = []
    for column, columns in ((0, half), (half, hidden - half)):
        out = torch.full((call.slots, columns), float(UNTOUCHED)).to(dtype)
        given = Stage2Arguments(h, info, moe.w2, moe.s2, *tables, call.weights, out, kept, call.tokens, column, columns)
        call.backend.launch(config, (call.blocks, columns), given)
        found.append(out)
    return Stage2Results(torch.cat(found, 1), kept, info)


def exact_sums(shape: MoeShape, stage: int, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the contract's sums int64 of each slot's row."""
    layer = layer_of(shape)
    codes, shifts = (layer.w13, layer.shift13) if stage == 1 else (layer.w2, layer.shift2)
    weights = integers(codes, shifts).double()  # holds the sums exactly
    a8, flat = quantize_rows(rows)[0].double(), ids.flatten()
    sums = torch.full((len(flat), weights.shape[1]), UNTOUCHED)
    for expert in range(shape.num_experts):
        sums[flat == expert] = (a8[flat == expert] @ weights[expert].T).long()
    return sums


def _compare(stage: str, tokens: int, found: torch.Tensor, expected: torch.Tensor) -> None:
    wrong = found.ne(expected)
    if bool(wrong.any()):
        slot, channel = wrong.nonzero()[0].tolist()
        raise KimiError(
            f"{int(wrong.sum())} sums of {stage} differ",
            where=f"{tokens} tokens, slot {slot}, channel {channel}: {found[slot, channel].item()}",
            expected=str(expected[slot, channel].item()),
        )


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def forwards(
    weights: list[str] = typer.Option(list(FORMATS), "--weights", help="Formats of the weights."),
    tp: list[int] = typer.Option([8, 4], "--tp", min=1, help="Tensor-parallel sizes."),
    tokens: list[int] = typer.Option(BATCHES, "--tokens", min=0, help="Batches."),
) -> None:
    """Execute batches in the interpreter and print the errors of their results; a broken contract ends the run."""
    number = 0
    for name in weights:
        for size in tp:
            for batch in tokens:
                order = ORDERS[number % len(ORDERS)]
                backend, shape = InterpretedBackend({}, order), shape_of(name, size)
                found = error(backend, shape, batch)
                if batch:
                    check_tokens(backend, shape, batch)
                    check_sums(call_of(backend, shape, batch_of(shape, batch)))
                label = order if isinstance(order, str) else "random"
                typer.echo(f"{name} tp {size} tokens {batch}: {found:.2e} ({label})")
                if not found <= TOLERANCE:
                    raise KimiError(f"the error {found:.2e} is above {TOLERANCE}", where=f"{name}, {batch} tokens")
                number += 1


if __name__ == "__main__":
    run(app)

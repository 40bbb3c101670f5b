"""The Triton kernels as compiled for gfx942, executed by the instruction interpreter, against the reference backend."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from kimi_w4a8_eagle3.moe.contract import MoeShape, PreparedMoe
from kimi_w4a8_eagle3.moe.reference import ReferenceBackend
from kimi_w4a8_eagle3.moe.triton.backend import StageTile, TritonBackend, TritonTiles
from kimi_w4a8_lab.kernels.random_layers import random_batch, random_layer
from proof.gfx942 import DataRace, Gfx942Device, Memory, parse_kernel
from proof.triton_compile import offline_driver, target_of

pytestmark = [pytest.mark.kernels, pytest.mark.slow]

SHAPE = MoeShape(num_experts=5, hidden=160, inter=80, top_k=3)  # tails in K and N
EXCLUSIVE = ("float", "partial")  # modes of kernels whose waves never write the same byte
CPU = torch.device("cpu")
CASES = {
    "decode tiles": (TritonTiles(16, StageTile(32, 256, 4, 2), StageTile(128, 128, 4, 2), 1), 3, "lockstep"),
    "fused quantization, chunks": (TritonTiles(16, StageTile(128, 32, 4, 2), StageTile(64, 32, 4, 2), 0), 5, "reverse"),
    "prefill tiles": (TritonTiles(64, StageTile(64, 64, 8, 2), StageTile(256, 128, 8, 2), 1), 70, "forward"),
    "random wave order": (TritonTiles(16, StageTile(64, 64, 4, 2), StageTile(64, 64, 4, 2), 1), 4, random.Random(7)),
}


class MachineLauncher:
    """Compiles each launch for gfx942 and executes it; a tensor that is no input starts out as unwritten memory."""

    def __init__(self, inputs: list[torch.Tensor], order: Any, broken: tuple[str, int] | None = None) -> None:
        """broken: (kernel, n): leave out the n-th barrier of that kernel."""
        self.memory, self.order, self.broken = Memory(), order, broken
        self.shared: dict[int, torch.Tensor] = {}  # by address, which no other tensor gets
        self.instructions = 0
        for tensor in inputs:
            self.address(tensor, written=True)

    def __call__(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        with offline_driver(target_of("gfx942")):
            compiled = kernel.warmup(*arguments, grid=grid, **constants)
        text = compiled.asm["amdgcn"]
        if self.broken and self.broken[0] == kernel.__name__:
            text = without_barrier(text, self.broken[1])
        code = parse_kernel(text)
        passed = [self.address(value) if isinstance(value, torch.Tensor) else value for value in arguments]
        passed += [0] * (len(code.args) - len(passed))  # Triton's scratch pointers
        counts = Gfx942Device(self.memory).launch(
            code,
            grid=(*grid, 1, 1)[:3],
            block=(64 * compiled.metadata.num_warps, 1, 1),
            args=passed,
            order=self.order,
            lds_bytes=compiled.metadata.shared,
            # In small reductions and sorts Triton lets several waves compute, and write, the same value.
            redundant_writes=constants.get("MODE") not in EXCLUSIVE,
        )
        self.instructions += counts.total()

    def address(self, tensor: torch.Tensor, written: bool = False) -> int:
        address = tensor.data_ptr()
        if address not in self.shared:
            self.shared[address] = tensor
            self.memory.share(tensor.view(-1).view(torch.uint8).numpy(), f"tensor{len(self.shared)}", written)
        return address


def without_barrier(text: str, number: int) -> str:
    lines = text.splitlines(keepends=True)
    del lines[[at for at, line in enumerate(lines) if line.strip() == "s_barrier"][number]]
    return "".join(lines)


@pytest.mark.parametrize("case", CASES)
def test_machine_code_agrees_with_the_reference(case: str) -> None:
    tiles, tokens, order = CASES[case]
    layer = random_layer(SHAPE, CPU)
    x, weights, ids = random_batch(SHAPE, tokens, CPU)
    ids[0, 1] = -1
    moe: PreparedMoe = TritonBackend().prepare(layer)
    launcher = MachineLauncher([x, weights, ids, moe.w13, moe.w2, moe.s13, moe.s2], order)

    out = TritonBackend(tiles, arch="gfx942", launch=launcher).forward(x, moe, weights, ids)

    reference = ReferenceBackend()
    expected = reference.forward(x, reference.prepare(layer), weights, ids).float()
    assert (out.float() - expected).norm() / expected.norm() < 2e-3
    assert launcher.instructions > 1000


@pytest.mark.parametrize(
    ("case", "kernel", "barrier"),
    [
        *(("decode tiles", "quantize_and_route", barrier) for barrier in range(3)),
        ("decode tiles", "quantize_act", 0),
        # Without it two waves write different values to the same bytes.
        ("fused quantization, chunks", "quantize_and_route", 0),
    ],
)
def test_a_missing_barrier_is_found_where_equal_values_are_allowed(case: str, kernel: str, barrier: int) -> None:
    tiles, tokens, order = CASES[case]
    x, weights, ids = random_batch(SHAPE, tokens, CPU)
    moe = TritonBackend().prepare(random_layer(SHAPE, CPU))
    launcher = MachineLauncher([x, weights, ids, moe.w13, moe.w2, moe.s13, moe.s2], order, (kernel, barrier))
    with pytest.raises(DataRace):
        TritonBackend(tiles, arch="gfx942", launch=launcher).forward(x, moe, weights, ids)

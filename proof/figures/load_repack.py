"""How fast one real-shape MoE layer is made ready after loading: GB/s of each backend's `prepare`, against a memcpy.

    python -m proof.figures.load_repack [--experts 384] [--hidden 7168] [--inter 256] [--repeats 3] [--device cpu]

The layer holds random INT4 words in Quark's `reorder` order, of the size that one rank of TP 8 gets of Kimi-K2.5.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import typer
from rich.console import Console
from rich.table import Table

from kimi_w4a8_eagle3.cli import run
from kimi_w4a8_eagle3.moe.contract import MoeShape, PreparedMoe, QuarkMoeWeights
from kimi_w4a8_eagle3.moe.flydsl.layout import prepare
from kimi_w4a8_eagle3.moe.reference import ReferenceBackend
from kimi_w4a8_eagle3.quark.packing import fold_scales

if TYPE_CHECKING:
    Prepare = Callable[[QuarkMoeWeights], PreparedMoe]

GIB = 2**30


@dataclass
class Row:
    """One measured step. Bytes count tensors; `extra_bytes` is the peak beyond input and result.

    `cpu_seconds` is the processor time of all threads, which other load on the machine hardly changes.
    """

    step: str
    seconds: float
    cpu_seconds: float
    in_bytes: int
    out_bytes: int
    extra_bytes: int

    @property
    def gb_per_s(self) -> float:
        """Input bytes handled per second, in GB."""
        return self.in_bytes / self.seconds / 1e9


def main(
    experts: int = typer.Option(384, help="Routed experts of the layer."),
    hidden: int = typer.Option(7168, help="Hidden size."),
    inter: int = typer.Option(256, help="MoE intermediate size of one rank."),
    repeats: int = typer.Option(3, min=1, help="Runs of each step; the fastest counts."),
    threads: int = typer.Option(0, help="CPU threads of torch; 0 leaves its own choice."),
    device: str = typer.Option("cpu", help="cpu, or cuda for a GPU (also ROCm)."),
    output: Path = typer.Option(None, "--json", help="Also write the rows to this file."),
) -> None:
    """Measure and print one table."""
    if threads:
        torch.set_num_threads(threads)
    words, scales = random_layer(MoeShape(experts, hidden, inter, top_k=8), torch.device(device))
    console = Console(width=max(110, Console().width))
    rows = []
    for step in steps(words, scales):
        if isinstance(step, str):
            console.print(step)
            continue
        name, run, inputs = step
        rows.append(measure(name, run, inputs, repeats, torch.device(device)))
    console.print(as_table(rows, f"{experts} experts, hidden {hidden}, {inter} a rank, {device}"))
    if output is not None:
        output.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


def random_layer(shape: MoeShape, device: torch.device) -> tuple[QuarkMoeWeights, tuple[torch.Tensor, ...]]:
    """A layer of random words, and the four scale tensors from which its folded scales were made."""
    experts, hidden, inter = shape.num_experts, shape.hidden, shape.inter
    torch.manual_seed(0)

    def words(rows: int, columns: int) -> torch.Tensor:
        size = (experts, rows, columns // 8)
        return torch.randint(-(2**31), 2**31 - 1, size, dtype=torch.int32, device=device)

    scales = tuple(torch.rand(size, device=device) for size in ((experts, 2), (experts, 2 * inter), (experts,)))
    scales += (torch.rand(experts, hidden, device=device),)
    weights = QuarkMoeWeights(
        shape,
        words(2 * inter, hidden),
        words(hidden, inter),
        fold_scales(scales[0], scales[1]),
        fold_scales(scales[2], scales[3]),
    )
    return weights, scales


def steps(
    weights: QuarkMoeWeights, scales: tuple[torch.Tensor, ...]
) -> Iterator[tuple[str, Callable[[], list[torch.Tensor]], list[torch.Tensor]] | str]:
    """(name, what to run, its inputs) of each step, or why a backend's step is left out."""
    layer = [weights.w13, weights.w2, weights.s13, weights.s2]
    yield "memcpy of the layer", lambda: [tensor.clone() for tensor in layer], layer
    yield "fold_scales", lambda: [fold_scales(*scales[:2]), fold_scales(*scales[2:])], list(scales)
    for name, load in PREPARE.items():
        try:
            prepare = load()
        except ImportError as error:
            yield f"{name}: not measured, {error}"
            continue
        yield f"prepare: {name}", lambda prepare=prepare: tensors_of(prepare(weights)), layer  # type: ignore[misc]


def load_reference() -> Prepare:
    """Plain int8, for the reference backend."""
    return ReferenceBackend().prepare


def load_triton() -> Prepare:
    """Two nibbles a byte, for the Triton kernels."""
    from kimi_w4a8_eagle3.moe.triton.backend import TritonBackend

    return TritonBackend().prepare


def load_flydsl() -> Prepare:
    """MFMA operand order, for the FlyDSL kernels; the conversion itself needs only torch."""
    return prepare


PREPARE: dict[str, Callable[[], Prepare]] = {
    "reference": load_reference,
    "triton": load_triton,
    "flydsl": load_flydsl,
}


def tensors_of(prepared: PreparedMoe) -> list[torch.Tensor]:
    """The tensors that stay in memory."""
    return [prepared.w13, prepared.w2, prepared.s13, prepared.s2]


def measure(
    name: str, run: Callable[[], list[torch.Tensor]], inputs: list[torch.Tensor], repeats: int, device: torch.device
) -> Row:
    """The fastest of `repeats` runs and the largest peak memory among them."""
    seconds, cpu_seconds, extra, out_bytes = float("inf"), float("inf"), 0, 0
    for _ in range(repeats):
        before = reset_peak(device)
        started, cpu_started = time.perf_counter(), time.process_time()
        result = run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = min(seconds, time.perf_counter() - started)
        cpu_seconds = min(cpu_seconds, time.process_time() - cpu_started)
        # A backend may pass scales through; what is shared with the input is no new memory.
        shared = {tensor.data_ptr() for tensor in inputs}
        out_bytes = nbytes([tensor for tensor in result if tensor.data_ptr() not in shared])
        extra = max(extra, peak(device) - before - out_bytes)
        del result
    return Row(name, seconds, cpu_seconds, nbytes(inputs), out_bytes, max(0, extra))


def nbytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def reset_peak(device: torch.device) -> int:
    """Forget the peak; returns the memory in use now, in bytes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak of the resident set starts anew
    return _status("VmRSS")


def peak(device: torch.device) -> int:
    """Peak memory since `reset_peak`, in bytes."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def as_table(rows: list[Row], title: str) -> Table:
    """Rows with speeds relative to the first one, which is the memcpy."""
    table = Table(title=f"Weight preparation: {title}")
    table.add_column("step")
    for column in ("in GiB", "out GiB", "temp GiB", "s", "GB/s in", "x memcpy", "CPU s"):
        table.add_column(column, justify="right")
    copy = rows[0]
    for row in rows:
        ratio = (row.seconds / row.in_bytes) / (copy.seconds / copy.in_bytes)
        sizes = (f"{size / GIB:.3f}" for size in (row.in_bytes, row.out_bytes, row.extra_bytes))
        table.add_row(
            row.step, *sizes, f"{row.seconds:.3f}", f"{row.gb_per_s:.3f}", f"{ratio:.1f}", f"{row.cpu_seconds:.3f}"
        )
    return table


if __name__ == "__main__":
    run(lambda: typer.run(main))

"""Count the Triton MoE kernels' machine code for every row of the tile table: a markdown table, no GPU needed.

python -m proof.figures.triton_counts [--arch gfx942|sm_90] [--inter 256] [--weights INT4|MXFP4]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import triton

from kimi_w4a8_eagle3.moe.contract import MoeShape
from kimi_w4a8_eagle3.quark.weight_format import FORMATS
from proof.gfx942 import parse_kernel
from proof.gfx942.stats import analyse
from proof.triton_compile import Compiled, compile_moe

TOKENS = (2, 8, 160, 600, 10240)  # one batch for each row of the table
NVIDIA_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


def main() -> None:
    """Print one line for each stage and batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=("gfx942", "sm_90"), default="gfx942")
    parser.add_argument("--inter", type=int, default=256, help="MoE intermediate size of a rank")
    parser.add_argument("--weights", choices=FORMATS, default="INT4", help="format of the weights")
    options = parser.parse_args()
    shape = MoeShape(384, 7168, options.inter, 8, weights=FORMATS[options.weights])
    columns, count = COUNTERS[options.arch]
    heads = ("T", "kernel", "m x n x bytes of K", "warps", *columns)
    print("|" + "|".join(heads) + "|\n|" + "---|" * len(heads))
    for tokens in TOKENS:
        for kernel in compile_moe(shape, options.arch, [tokens]):
            if kernel.name in ("stage1", "stage2"):
                tile = " x ".join(str(kernel.constants[name]) for name in ("BM", "BN", "BK"))
                cells = (tokens, kernel.name, tile, kernel.constants["num_warps"], *count(kernel))
                print("|" + "|".join(str(cell) for cell in cells) + "|")


def _gfx942(compiled: Compiled) -> tuple[object, ...]:
    """Figures of the hot loop, or of the whole kernel when K is one step; one wave."""
    stats = analyse(parse_kernel(compiled.kernel.asm["amdgcn"]), lds_bytes=compiled.kernel.metadata.shared)
    mix = stats.hot if stats.hot_is_loop else stats.whole
    ratio = mix.ratio(False)
    return (
        f"{stats.vgprs}+{stats.agprs}",
        stats.vgpr_spills + stats.sgpr_spills,
        stats.lds_bytes,
        f"{stats.waves_per_simd:g}",
        mix.mfma,
        mix.valu,
        f"{ratio:.2f}" if ratio is not None else "",
    )


def _sm_90(compiled: Compiled) -> tuple[object, ...]:
    """Figures of the whole kernel from ptxas and the disassembler."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.kernel.asm["cubin"])
        usage = subprocess.run([NVIDIA_TOOLS / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True).stdout
        code = subprocess.run([NVIDIA_TOOLS / "nvdisasm", "-c", cubin], capture_output=True, text=True).stdout
    opcodes = Counter(re.findall(r"\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", code))
    registers, stack = (int(re.findall(rf"{name}:(\d+)", usage)[-1]) for name in ("REG", "STACK"))
    shared, threads = compiled.kernel.metadata.shared, 32 * compiled.kernel.metadata.num_warps
    blocks = min(228 * 1024 // (shared + 1024), 65536 // (registers * threads))
    return registers, stack, shared, blocks, opcodes["IGMMA"], opcodes["IMMA"], opcodes["LDGSTS"]


COUNTERS = {
    "gfx942": (("VGPR+AGPR", "spills", "LDS B", "waves/SIMD", "MFMA", "VALU", "VALU/MFMA clocks"), _gfx942),
    "sm_90": (("registers", "stack B", "shared B", "blocks/SM", "wgmma", "mma", "async copies"), _sm_90),
}

if __name__ == "__main__":
    main()

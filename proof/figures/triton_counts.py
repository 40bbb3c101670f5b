"""Count the Triton MoE kernels' gfx942 code for every row of the tile table: a markdown table, no GPU needed.

python -m proof.figures.triton_counts [--inter 256] [--weights INT4|MXFP4]
"""

from __future__ import annotations

import argparse

from kimi_w4a8_eagle3.moe.contract import MoeShape
from kimi_w4a8_eagle3.quark.weight_format import FORMATS
from proof.gfx942 import parse_kernel
from proof.gfx942.stats import analyse
from proof.triton_compile import Compiled, compile_moe

TOKENS = (2, 8, 160, 600, 10240)  # one batch for each row of the table
COUNTED = ("VGPR+AGPR", "spills", "LDS B", "waves/SIMD", "MFMA", "VALU", "VALU/MFMA clocks")


def main() -> None:
    """Print one line for each stage and batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inter", type=int, default=256, help="MoE intermediate size of a rank")
    parser.add_argument("--weights", choices=FORMATS, default="INT4", help="format of the weights")
    options = parser.parse_args()
    shape = MoeShape(384, 7168, options.inter, 8, weights=FORMATS[options.weights])
    heads = ("T", "kernel", "m x n x bytes of K", "warps", *COUNTED)
    print("|" + "|".join(heads) + "|\n|" + "---|" * len(heads))
    for tokens in TOKENS:
        for kernel in compile_moe(shape, "gfx942", [tokens]):
            if kernel.name in ("stage1", "stage2"):
                tile = " x ".join(str(kernel.constants[name]) for name in ("BM", "BN", "BK"))
                cells = (tokens, kernel.name, tile, kernel.constants["num_warps"], *_counts(kernel))
                print("|" + "|".join(str(cell) for cell in cells) + "|")


def _counts(compiled: Compiled) -> tuple[object, ...]:
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


if __name__ == "__main__":
    main()

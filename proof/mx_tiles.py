"""`python -m proof.mx_tiles`: how often MXFP4 tiles need shifted products, and the time of 10,240 tokens.

A tile has 16 channels x 128 k, four blocks of a channel. Its products are shifted if a block lies over three octaves
above the least of its row, and multiplied again if a channel's blocks in the tile span over four octaves.
"""

from __future__ import annotations

import torch

from kimi_w4a8_eagle3.machine.hardware import gpu_by_name
from kimi_w4a8_eagle3.moe.contract import MoeShape
from kimi_w4a8_eagle3.quark.packing import MAX_SHIFT
from kimi_w4a8_eagle3.quark.weight_format import MXFP4

from .account.moe_time import CACHE_TB_S, SMALL_TB_S, SMALL_US, ours

ROWS, K, INTER, TOKENS = 512, 7168, 256, 10240
# Clocks of vector operations and of issuing matrix instructions by the matrix unit's 256 of a tile with 64 rows, TP 8:
# of every tile, with shifted products, multiplied again, and converted because sums exceed the float of the start.
NEAR = {"stage1": 0.727 + 0.25, "stage2": 1.059 + 0.25}
SHIFTED, AGAIN, CONVERTED = 29 * 4 / 256, (66 * 4 + 64) / 256, 46 * 4 / 256
SHORT_BLOCKS_US, LAUNCHES_US = 27, {"stage1": 13.3, "stage2": 7 * 8.9}  # blocks of up to 32 rows unpack twice as much


def weights(name: str) -> torch.Tensor:
    """Return float32 [ROWS, K] of a distribution."""
    torch.manual_seed(0)
    kind, _, number = name.partition(" ")
    normal = torch.randn(ROWS, K)
    return {
        "Laplace": lambda: torch.distributions.Laplace(0.0, 1.0).sample((ROWS, K)),
        "t": lambda: torch.distributions.StudentT(float(number)).sample((ROWS, K)),
        "outliers": lambda: torch.where(torch.rand(ROWS, K) < 1e-4, 30 * normal, normal),
        "log-normal": lambda: normal * (float(number) * torch.randn(K)).exp(),
    }.get(kind, lambda: normal)()


def shares(exponents: torch.Tensor) -> tuple[float, float, float]:
    """Return the shares of tiles that are shifted and multiplied again, and of channel tiles with a shifted tile."""
    base = torch.maximum(exponents.amin(-1), exponents.amax(-1) - MAX_SHIFT)
    shifts = (exponents - base[:, None]).clamp(min=0).view(len(exponents), -1, 4)
    highest, least = shifts.amax(-1), shifts.amin(-1).clamp(max=3)
    tiles = [mask.view(-1, 16, mask.shape[-1]).any(1) for mask in (highest > 3, (highest > 3) & (highest - least > 3))]
    return tiles[0].double().mean().item(), tiles[1].double().mean().item(), tiles[0].any(-1).double().mean().item()


def main() -> None:
    """Print shares and modelled times of the distributions, and the least time of a layer in two parts, in Triton."""
    gpu, mxfp4 = gpu_by_name("mi325x"), MoeShape(384, K, INTER, 8, weights=MXFP4)
    int4 = {kernel.name: kernel.us for kernel in ours(gpu, MoeShape(384, K, INTER, 8), TOKENS)}
    print(f"INT4: {(total := sum(int4.values())):.0f} us\nK 7,168: shifted, again; K 256: the same; us; of INT4")
    names = "Gaussian, Laplace, t 5, t 4, t 3, outliers, log-normal 0.5, log-normal 0.9, log-normal 1"
    for name in names.split(", "):
        exponents = weights(name).abs().view(ROWS, -1, 32).amax(-1).log2().floor()
        found = {"stage1": shares(exponents), "stage2": shares(exponents.view(-1, INTER // 32))}
        us = total + SHORT_BLOCKS_US
        for stage, (shifted, again, converted) in found.items():
            vector = NEAR[stage] + SHIFTED * shifted + AGAIN * again + (stage == "stage2") * CONVERTED * converted
            us += (int4[stage] - LAUNCHES_US[stage]) * (max(vector, 1 + again) - 1)
        print(f"{name:15}", *(f"{at[0]:>9.1%}{at[1]:>7.1%}" for at in found.values()), f"{us:>7,.0f}{us / total:>9.2f}")
    for tokens in (8, 40, 160, TOKENS):  # torch adds the parts: 35 launches, and 44 bytes for each sum of a part
        us = 2 * sum(kernel.us for kernel in ours(gpu, mxfp4, tokens) if "stage" in kernel.name) + 35 * SMALL_US
        low, high = (us + 88e-6 * tokens * 8 * (2 * INTER + K) / rate for rate in (CACHE_TB_S, SMALL_TB_S))
        print(f"{tokens:,} tokens in two parts: {low:,.0f} to {high:,.0f} us")


if __name__ == "__main__":
    main()

"""Time the Triton W4A8 MoE on the GPU at hand against a copy of its weights and SGLang's BF16 fused MoE.

    python -m proof.figures.moe_triton [--inter 256] [--tokens 8 40 160 10240] [--json FILE] [--no-sglang]

Every figure is a median of CUDA-event times. Batches up to 512 run inside a CUDA graph as in serving; the weights that
they touch (164 MB at 8 tokens) do not fit the L2 cache, so nothing is left of the previous run. "copy" copies as many
bytes as the weights of the experts that the batch touches. "peak" is the share of the GPU's dense INT8 peak. Each
batch is first compared with the reference backend.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from triton.testing import do_bench, do_bench_cudagraph

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.moe.contract import MoeShape, QuarkMoeWeights
from kimi_w4a8_eagle3.moe.dispatch import gpu_arch
from kimi_w4a8_eagle3.moe.reference import ReferenceBackend
from kimi_w4a8_eagle3.moe.triton.backend import TritonBackend
from kimi_w4a8_eagle3.moe.tune import random_batch, random_layer
from kimi_w4a8_eagle3.quark.packing import unpack_reorder

INT8_PEAK = {"sm_90": 1979e12, "gfx942": 2614.9e12}  # dense, from the data sheets (gfx942: MI325X)
GRAPH_TOKENS = 512  # larger batches are prefill, which is not captured


def main() -> int:
    """Print one line a batch; exit code 1 without a GPU or on a wrong result."""
    options = _arguments()
    device = torch.device("cuda")
    arch = gpu_arch(device)
    if arch is None:
        print("moe_triton: this machine has no GPU; nothing was measured", file=sys.stderr)
        return 1
    shape = MoeShape(384, 7168, options.inter, 8)
    layer = random_layer(shape, device)
    backend, reference = TritonBackend(), ReferenceBackend()
    moe, plain = backend.prepare(layer), reference.prepare(layer)
    sglang = None if options.no_sglang else _sglang_bf16(layer)

    rows = []
    for tokens in options.tokens:
        x, weights, ids = random_batch(shape, tokens, device)
        error = _error(backend.forward(x, moe, weights, ids), reference.forward(x, plain, weights, ids))
        row = _measure(tokens, shape, arch, ids, partial(backend.forward, x, moe, weights, ids))
        row["error"] = error
        if sglang is not None:
            row["sglang_bf16_us"] = _time_us(tokens, partial(sglang, x, weights, ids))
            row["sglang_bf16_over_ours"] = row["sglang_bf16_us"] / row["ours_us"]
        rows.append(row)
        print(json.dumps({key: round(value, 4) for key, value in row.items()}), flush=True)
    if options.json:
        head = {"gpu": torch.cuda.get_device_name(device), "arch": arch, "inter": options.inter}
        options.json.write_text(json.dumps(head | {"rows": rows}, indent=2) + "\n")
    return 0 if all(row["error"] < 4e-3 for row in rows) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inter", type=int, default=256, help="MoE intermediate size of a rank: 256 at TP 8, 512 at 4")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 40, 160, 512, 2048, 10240])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument(
        "--no-sglang", action="store_true", help="leave out the BF16 comparison (4.2 GB at --inter 256)"
    )
    return parser.parse_args()


def _measure(
    tokens: int, shape: MoeShape, arch: str, ids: torch.Tensor, forward: Callable[[], Any]
) -> dict[str, float]:
    ours = _time_us(tokens, forward)
    touched = int(ids.unique().numel())
    size = touched * 3 * shape.hidden * shape.inter // 2
    source, target = (torch.empty(size, dtype=torch.int8, device=ids.device) for _ in range(2))
    copy = _time_us(tokens, lambda: target.copy_(source))
    operations = 2 * 3 * tokens * shape.top_k * shape.hidden * shape.inter
    return {
        "tokens": tokens,
        "experts": touched,
        "weight_mb": size / 1e6,
        "ours_us": ours,
        "copy_us": copy,
        "ours_over_copy": ours / copy,
        "peak": operations / (ours * 1e-6) / INT8_PEAK[arch] if arch in INT8_PEAK else float("nan"),
    }


def _time_us(tokens: int, function: Callable[[], Any]) -> float:
    bench = do_bench_cudagraph if tokens <= GRAPH_TOKENS else do_bench
    return 1000 * float(bench(function, rep=100, return_mode="median"))


def _error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.float() - expected.float()).norm() / expected.float().norm())


def _sglang_bf16(layer: QuarkMoeWeights) -> Callable[..., torch.Tensor]:
    """SGLang's public Triton fused MoE on the same weights in BF16."""
    try:
        from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import fused_experts_impl
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
    except ImportError as error:
        raise KimiError(f"SGLang's fused MoE does not import: {error}", remedy="--no-sglang") from error
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))

    def dequantize(words: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        out = torch.empty(*words.shape[:2], words.shape[2] * 8, dtype=torch.bfloat16, device=words.device)
        for expert in range(len(words)):  # one expert at a time: float32 of a layer would take 8.5 GB
            out[expert] = (unpack_reorder(words[expert]).float() * scale[expert].unsqueeze(-1)).bfloat16()
        return out

    w13, w2 = dequantize(layer.w13, layer.s13), dequantize(layer.w2, layer.s2)
    return lambda x, weights, ids: fused_experts_impl(x, w13, w2, weights, ids)


if __name__ == "__main__":
    sys.exit(main())

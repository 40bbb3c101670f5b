"""Dense products in FP8, quantized after loading: attention's projections, shared experts and the dense layer.

The checkpoint has these weights in BF16. With KIMI_DENSE_FP8 each output channel gets a scale when the model is loaded,
and each token gets one in every product: of prefills, or of all passes. In a step, quantizing inputs takes longer than
reading half of the weights saves, so "prefill" keeps both weights. kv_b's halves, which decoding absorbs, stay BF16, as
do router, output head, draft and vision tower. Each rank quantizes its own share.

It is FP8, because SGLang and AITER have this product for gfx942, and AMD tuned it for these shapes.
"""

from __future__ import annotations

import logging
import os
import re
from typing import TYPE_CHECKING, Any

import torch
from sglang.kernels.ops.quantization.fp8_kernel import is_fp8_fnuz
from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.quantization import fp8_utils
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

from ...gates import read_gates
from ...quark import fp8
from ..hooks import Feature

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)
_LAYERS = "sglang.srt.layers.quantization"
FEATURE = Feature(
    "dense products in FP8",
    remove_when="SGLang quantizes the BF16 layers of a Quark checkpoint to FP8 per token and channel while it loads",
    needs=(
        f"{_LAYERS}.fp8_utils.apply_fp8_ptpc_linear",
        f"{_LAYERS}.unquant.UnquantizedLinearMethod.apply",
    ),
    optional=True,
)
_DENSE = re.compile(
    r"model\.layers\.\d+\.(self_attn\.(fused_qkv_a_proj_with_mqa|q_b_proj|kv_b_proj|o_proj)"
    r"|mlp\.(shared_experts\.)?(gate_up_proj|down_proj))"
)


_step = [False]  # True while the target runs another pass than a prefill; a graph keeps what its capture saw


class Fp8Linear(LinearMethodBase):
    """Linear method of a layer with `fp8_weight` [N, K], on a GPU in AITER's order, and `weight_scale` [N, 1].

    in_steps: the method of all passes but prefills; None for this one.
    """

    def __init__(self, in_steps: LinearMethodBase | None) -> None:
        self._in_steps = in_steps

    def create_weights(self, *_: object, **__: object) -> None:
        """Refuse: the layer was created and loaded in BF16."""
        raise NotImplementedError("a layer is quantized to FP8 after it was loaded in BF16")

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply by AITER's kernel, on a CPU in plain torch."""
        if self._in_steps is not None and _step[0]:
            return self._in_steps.apply(layer, x, bias)
        if x.is_cuda:  # AITER's quantization reads rows without a stride
            return fp8_utils.apply_fp8_ptpc_linear(x.contiguous(), layer.fp8_weight, layer.weight_scale, bias=bias)
        out = fp8.linear(x, layer.fp8_weight, layer.weight_scale)
        return out if bias is None else out + bias


@FEATURE.before("sglang.srt.models.deepseek_v2.DeepseekV2ForCausalLM.forward")
def note_pass(_: Any, input_ids: Any, positions: Any, forward_batch: ForwardBatch, *__: Any, **___: Any) -> None:
    """Tell the target's layers whether the pass is a prefill."""
    mode = forward_batch.forward_mode
    _step[0] = not mode.is_extend() or mode.is_target_verify()


@FEATURE.after("sglang.srt.model_executor.model_runner.ModelRunner.load_model")
def quantize_target(_: None, runner: ModelRunner) -> None:
    """Quantize the target's dense layers, or say why the engine serves without it."""
    passes = read_gates(os.environ).get("KIMI_DENSE_FP8")
    if runner.is_draft_worker or passes in (None, "off"):
        return
    target = getattr(runner.model, "language_model", runner.model)
    layers = {name: layer for name, layer in target.named_modules() if _DENSE.fullmatch(name)}
    speaks = not get_tp_group().rank_in_group
    if reason := reason_against(layers):
        FEATURE.leave_out(reason, speaks)
        return
    for layer in layers.values():
        quantize(layer, everywhere=passes == "all")
    if speaks:
        size = sum(layer.fp8_weight.nbytes for layer in layers.values()) / 2**30
        logger.info(
            "%d dense layers of each rank have %.2f GiB of FP8 weights for passes: %s", len(layers), size, passes
        )


def reason_against(layers: dict[str, Any]) -> str | None:
    """Return what speaks against FP8 for these layers, by name; None if nothing does."""
    if not layers:
        return "the model has no dense layers of DeepSeek-V3's names"
    for name, layer in layers.items():
        if type(layer.quant_method) is not UnquantizedLinearMethod or layer.weight.dtype != torch.bfloat16:
            return f"the checkpoint has {name} quantized"
        if layer.weight.is_cuda and (why := _no_kernel(*layer.weight.shape)):
            return f"{name}: {why}"
    return None


def _no_kernel(n: int, k: int) -> str | None:
    """Return why AITER has no kernel for a weight [N, K]; its choice is rowwise_heuristic_dispatch in c16d44b."""
    if not (is_fp8_fnuz() and os.environ.get("SGLANG_USE_AITER", "").lower() in ("1", "true")):
        return "the kernel is AITER's on gfx942 (SGLANG_USE_AITER=1)"
    channels = 64 if k >= 1536 else 128 if k >= 512 else 256
    if n % channels or k % 64 or k < 192:
        return f"a rank's share has {n} outputs and {k} inputs, and AITER needs a multiple of {channels} and of 64"
    return None


def quantize(layer: Any, everywhere: bool) -> None:
    """Add FP8 with a scale for each output channel to a layer's BF16 weight [N, K], or replace that everywhere."""
    codes, scale = fp8.quantize_rows(layer.weight.data)
    if codes.is_cuda:
        from aiter.ops.shuffle import shuffle_weight  # not installed on a CPU

        codes = shuffle_weight(codes, (16, 16))
    layer.fp8_weight = torch.nn.Parameter(codes, requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
    layer.quant_method = Fp8Linear(None if everywhere else layer.quant_method)
    if everywhere:
        layer.weight = layer.fp8_weight

"""The W4A8 schemes inside SGLang: load parameters as Quark stores them, repack them once, run our fused MoE."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.moe import MoeRunnerConfig
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput, StandardDispatchOutput
from sglang.srt.layers.parameter import GroupQuantScaleParameter, PackedvLLMParameter
from sglang.srt.layers.quantization.quark.schemes import QuarkLinearScheme, QuarkMoEScheme
from sglang.srt.utils import set_weight_attrs

from ...base.errors import KimiError
from ...gates import read_gates
from ...moe.contract import MoeShape, QuarkMoeWeights
from ...moe.dispatch import select_backend
from ...moe.layer_check import require_layer
from ...moe.op import MoeLayer
from ...quark.packing import ABSENT, NAN_EXPONENT, dequantized, fold_layer, fold_scales
from ...quark.weight_format import INT4, MXFP4, NIBBLES_PER_WORD, WeightFormat
from . import load_check

if TYPE_CHECKING:
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE


logger = logging.getLogger(__name__)


class QuarkW4A8MoE(QuarkMoEScheme):
    """INT4 or MXFP4 weights times INT8 activations (per token, dynamic).

    While loading, a layer holds w13_weight and w2_weight in Quark's packing and their scales. After loading, the
    weights are in the backend's layout and the scales are folded to one a row.
    """

    def __init__(self, layer_name: str, weights: WeightFormat) -> None:
        self.layer_name, self.weights = layer_name, weights
        self.moe: MoeLayer | None = None
        self.output_scale = 1.0

    @classmethod
    def get_min_capability(cls) -> int:
        """Return 0: no CUDA capability is required, and the dispatcher picks a backend that runs on the device."""
        return 0

    def create_weights(
        self,
        layer: FusedMoE,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: object,
    ) -> None:
        """Register the parameters that SGLang's expert loader fills; NaN scales reveal what it left out."""
        # Imported here: SGLang's layer module imports its quantization package, from which this module is loaded.
        from sglang.srt.layers.moe.fused_moe_triton import FusedMoeWeightScaleSupported

        inter, unit = intermediate_size_per_partition, self.weights.block or NIBBLES_PER_WORD
        for size, name in ((hidden_size, "hidden size"), (inter, "intermediate size per rank")):
            if size % unit:
                raise KimiError(
                    f"{self.layer_name}: the {name} {size} is not a multiple of {unit}",
                    expected=f"whole {'blocks' if self.weights.block else 'int32 words'} of {unit} {self.weights} "
                    "values on every rank",
                    remedy=f"choose a tensor-parallel size that divides the experts' intermediate size / {unit}",
                )

        def add(name: str, value: torch.Tensor, **attrs: object) -> None:
            parameter = torch.nn.Parameter(value, requires_grad=False)
            layer.register_parameter(name, parameter)
            set_weight_attrs(parameter, {**extra_weight_attrs, **attrs})

        def unset(*shape: int) -> torch.Tensor:
            return torch.full(shape, float("nan"), dtype=torch.float32)

        rows13, rows2 = (num_experts, 2 * inter), (num_experts, hidden_size)
        if block := self.weights.block:
            group = {"quant_method": FusedMoeWeightScaleSupported.GROUP.value}
            for name, rows, k in (("w13", rows13, hidden_size), ("w2", rows2, inter)):
                add(f"{name}_weight", torch.empty(*rows, k // 2, dtype=torch.uint8))
                scales = torch.full((*rows, k // block), NAN_EXPONENT, dtype=torch.uint8)
                add(f"{name}_weight_scale", scales, **group)
            return
        tensor = {"quant_method": FusedMoeWeightScaleSupported.TENSOR.value}
        channel = {"quant_method": FusedMoeWeightScaleSupported.CHANNEL.value}
        add("w13_weight", torch.empty(*rows13, hidden_size // unit, dtype=torch.int32))
        add("w2_weight", torch.empty(*rows2, inter // unit, dtype=torch.int32))
        add("w13_weight_scale", unset(num_experts, 2), **tensor)
        add("w2_weight_scale", unset(num_experts), **tensor)
        add("w13_weight_scale_2", unset(*rows13), **channel)
        add("w2_weight_scale_2", unset(*rows2), **channel)

    def create_moe_runner(self, layer: FusedMoE, moe_runner_config: MoeRunnerConfig) -> None:
        """Refuse a layer that our kernels do not compute, and keep the scale that SGLang leaves to the kernel."""
        config = moe_runner_config
        if config.activation != "silu" or not config.is_gated or config.apply_router_weight_on_input:
            raise KimiError(
                f"{self.layer_name}: activation {config.activation!r}, gated={config.is_gated}, "
                f"router weight on input={config.apply_router_weight_on_input}",
                expected="a gated SiLU MoE with router weights on the output",
            )
        # DeepSeek's model code applies the routed scaling factor, except on CUDA, where the kernel does.
        if torch.version.cuda and torch.cuda.is_available() and config.routed_scaling_factor is not None:
            self.output_scale = float(config.routed_scaling_factor)
        self.top_k = int(config.top_k or layer.top_k)

    def process_weights_after_loading(self, layer: FusedMoE) -> None:
        """Fold the scales and repack the weights for the backend, with one layer of extra memory."""
        if self.moe is not None:
            return
        # Where ranks hold different experts, SGLang 0.5.20 gives AITER's runner the ids of all; ours reads its own.
        layer.dispatcher.use_aiter_moe_runner = False
        gates = read_gates(os.environ)
        if gates.load_check:
            load_check.require_as_stored(self.layer_name, layer, self.weights)
        weights = self._loaded(layer)
        backend = select_backend(weights.shape, weights.w13.device, gates, in_parts=weights.more is not None)
        self.moe = MoeLayer(backend, weights)
        if gates.load_check:
            require_layer(self.layer_name, backend, self.moe.prepared, weights)
        prepared = self.moe.prepared
        for name in ("w13_weight_scale_2", "w2_weight_scale_2") if self.weights == INT4 else ():
            delattr(layer, name)
        for name, value in (
            ("w13_weight", prepared.w13),
            ("w2_weight", prepared.w2),
            ("w13_weight_scale", prepared.s13),
            ("w2_weight_scale", prepared.s2),
        ):
            setattr(layer, name, torch.nn.Parameter(value, requires_grad=False))

    def apply_weights(self, layer: FusedMoE, dispatch_output: StandardDispatchOutput) -> StandardCombineInput:
        """Run the fused MoE on the tokens that SGLang routed."""
        assert self.moe is not None
        topk = dispatch_output.topk_output
        out = self.moe(dispatch_output.hidden_states, topk.topk_weights, topk.topk_ids)
        if self.output_scale != 1.0:
            out = out * self.output_scale
        return StandardCombineInput(hidden_states=out)

    def _loaded(self, layer: FusedMoE) -> QuarkMoeWeights:
        """Return the layer's loaded weights, with the scales folded to one a row."""
        experts, rows, _ = layer.w13_weight.shape
        hidden = layer.w2_weight.shape[1]
        shape = MoeShape(experts, hidden, rows // 2, self.top_k, weights=self.weights)
        w13, w2 = layer.w13_weight.data, layer.w2_weight.data
        if self.weights == MXFP4:
            for name in ("w13", "w2"):
                scale = getattr(layer, f"{name}_weight_scale").data
                self._require_scales(name, (scale == NAN_EXPONENT).flatten(1).any(1))
            parts = fold_layer((w13, layer.w13_weight_scale.data), (w2, layer.w2_weight_scale.data))
            first = [shifts for shifts, _ in parts[0]]
            blocks = sum(shifts.numel() for shifts in first)
            far, large = (sum(int((shifts >= least).sum()) for shifts in first) for least in (ABSENT, 4))
            level = logging.WARNING if far else logging.INFO
            log = "%s: %d of %d MXFP4 blocks lie too far below their row's largest for one sum, so the layer has %d; "
            log += "%.1f %% of the blocks have large shifts"
            logger.log(level, log, self.layer_name, far, blocks, len(parts), 100 * large / blocks)
            return QuarkMoeWeights.of(shape, w13, w2, parts)
        s13 = fold_scales(layer.w13_weight_scale, layer.w13_weight_scale_2)
        s2 = fold_scales(layer.w2_weight_scale, layer.w2_weight_scale_2)
        self._require_scales("w13", ~torch.isfinite(s13).all(dim=1))
        self._require_scales("w2", ~torch.isfinite(s2).all(dim=1))
        return QuarkMoeWeights(shape, w13, w2, s13, s2)

    def _require_scales(self, name: str, bad: torch.Tensor) -> None:
        """Raise KimiError if the mask [E] shows an expert without all its scales."""
        if not bool(bad.any()):
            return
        projections = {"w13": "w13 (gate_proj, up_proj)", "w2": "w2 (down_proj)"}[name]
        tensors = "weight_scale" if self.weights.block else "weight_scale and weight_scale_2"
        raise KimiError(
            f"{self.layer_name}: {int(bad.sum())} of {len(bad)} experts have a missing or NaN scale in {projections}, "
            f"the first is expert {int(bad.nonzero()[0])}",
            expected=f"{tensors} for every expert projection",
            remedy="run `kimi-w4a8 check MODEL` to see every faulty tensor",
        )


class QuarkMxfp4Linear(QuarkLinearScheme):
    """A dense or shared-expert MLP that the checkpoint stores in MXFP4, computed in BF16, which holds it exactly."""

    requires_weight_loader_v2 = True  # as both parameter classes do

    def __init__(self, layer_name: str) -> None:
        self.layer_name = layer_name

    @classmethod
    def get_min_capability(cls) -> int:
        """Return 0: torch multiplies."""
        return 0

    def create_weights(
        self,
        layer: Any,
        output_partition_sizes: list[int],
        input_size_per_partition: int,
        params_dtype: torch.dtype,
        weight_loader: Callable[..., None],
        **sizes: int,
    ) -> None:
        """Register the codes and their scales; NaN scales reveal what the loader left out."""
        block = MXFP4.block
        assert block is not None
        rows, k = sum(output_partition_sizes), input_size_per_partition
        if k % block:
            raise KimiError(
                f"{self.layer_name}: {k} inputs on each rank are not a multiple of {block}",
                expected=f"whole blocks of {block} MXFP4 values on every rank",
                remedy=f"choose a tensor-parallel size that divides the layer's inputs / {block}",
            )
        layer.logical_widths = output_partition_sizes
        common = {"input_dim": 1, "output_dim": 0, "weight_loader": weight_loader}
        codes = torch.empty(rows, k // 2, dtype=torch.uint8)
        scales = torch.full((rows, k // block), NAN_EXPONENT, dtype=torch.uint8)
        layer.register_parameter("weight", PackedvLLMParameter(data=codes, packed_dim=1, packed_factor=2, **common))
        layer.register_parameter("weight_scale", GroupQuantScaleParameter(data=scales, **common))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the codes by BF16 weights."""
        if layer.weight.dtype == torch.bfloat16:
            return
        if bool((layer.weight_scale == NAN_EXPONENT).any()):
            raise KimiError(
                f"{self.layer_name}: an MXFP4 scale is missing or NaN",
                expected="a finite weight_scale for every block",
                remedy="run `kimi-w4a8 check MODEL` to see every faulty tensor",
            )
        weight = dequantized(layer.weight.data, layer.weight_scale.data)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        del layer.weight_scale

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply in BF16."""
        return torch.nn.functional.linear(x, layer.weight, bias)

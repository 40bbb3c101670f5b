"""The W4A8 MoE scheme inside SGLang: load parameters as Quark stores them, repack them once, run our fused MoE."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.moe import MoeRunnerConfig
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput, StandardDispatchOutput
from sglang.srt.layers.quantization.quark.schemes import QuarkMoEScheme
from sglang.srt.utils import set_weight_attrs

from ..base.errors import KimiError
from ..gates import read_gates
from ..moe.agreement import require_layer
from ..moe.contract import MoeShape, QuarkMoeWeights
from ..moe.dispatch import select_backend
from ..moe.op import MoeLayer
from ..quark.packing import NIBBLES_PER_WORD, fold_scales
from . import load_check

if TYPE_CHECKING:
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE


class QuarkInt4Int8MoE(QuarkMoEScheme):
    """INT4 weights (per channel, with a per-tensor first stage) times INT8 activations (per token, dynamic).

    While loading, a layer holds w13_weight int32 [E, 2I, H/8], w2_weight int32 [E, H, I/8] and their scales. After
    loading, the weights are in the backend's layout and the scales are folded.
    """

    def __init__(self, layer_name: str) -> None:
        self.layer_name = layer_name
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

        inter, words = intermediate_size_per_partition, NIBBLES_PER_WORD
        for size, name in ((hidden_size, "hidden size"), (inter, "intermediate size per rank")):
            if size % words:
                raise KimiError(
                    f"{self.layer_name}: the {name} {size} is not a multiple of {words}",
                    expected=f"whole int32 words of {words} INT4 values on every rank",
                    remedy="choose a tensor-parallel size that divides the experts' intermediate size / 8",
                )

        def add(name: str, value: torch.Tensor, **attrs: object) -> None:
            parameter = torch.nn.Parameter(value, requires_grad=False)
            layer.register_parameter(name, parameter)
            set_weight_attrs(parameter, {**extra_weight_attrs, **attrs})

        def unset(*shape: int) -> torch.Tensor:
            return torch.full(shape, float("nan"), dtype=torch.float32)

        tensor = {"quant_method": FusedMoeWeightScaleSupported.TENSOR.value}
        channel = {"quant_method": FusedMoeWeightScaleSupported.CHANNEL.value}
        add("w13_weight", torch.empty(num_experts, 2 * inter, hidden_size // words, dtype=torch.int32))
        add("w2_weight", torch.empty(num_experts, hidden_size, inter // words, dtype=torch.int32))
        add("w13_weight_scale", unset(num_experts, 2), **tensor)
        add("w2_weight_scale", unset(num_experts), **tensor)
        add("w13_weight_scale_2", unset(num_experts, 2 * inter), **channel)
        add("w2_weight_scale_2", unset(num_experts, hidden_size), **channel)

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
        gates = read_gates(os.environ)
        if gates.load_check:
            load_check.require_as_stored(self.layer_name, layer)
        weights = self._loaded(layer)
        backend = select_backend(weights.shape, weights.w13.device, gates)
        self.moe = MoeLayer(backend, weights)
        if gates.load_check:
            require_layer(self.layer_name, backend, self.moe.prepared, weights)
        prepared = self.moe.prepared
        for name in ("w13_weight_scale_2", "w2_weight_scale_2"):
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
        """Return the layer's loaded weights, with the scales folded per output channel."""
        experts, rows, _ = layer.w13_weight.shape
        s13 = fold_scales(layer.w13_weight_scale, layer.w13_weight_scale_2)
        s2 = fold_scales(layer.w2_weight_scale, layer.w2_weight_scale_2)
        for name, scale in (("w13 (gate_proj, up_proj)", s13), ("w2 (down_proj)", s2)):
            bad = ~torch.isfinite(scale).all(dim=1)
            if bool(bad.any()):
                raise KimiError(
                    f"{self.layer_name}: {int(bad.sum())} of {experts} experts have a missing or NaN scale in {name}, "
                    f"the first is expert {int(bad.nonzero()[0])}",
                    expected="weight_scale and weight_scale_2 for every expert projection",
                    remedy="run `kimi-w4a8 check MODEL` to see every faulty tensor",
                )
        hidden = layer.w2_weight.shape[1]
        shape = MoeShape(num_experts=experts, hidden=hidden, inter=rows // 2, top_k=self.top_k)
        return QuarkMoeWeights(shape, w13=layer.w13_weight.data, w2=layer.w2_weight.data, s13=s13, s2=s2)

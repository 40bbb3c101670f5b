"""The plugin in SGLang's own framework: loaded by entry point, dispatching W4A8 and leaving the rest alone."""

from support.sglang_program import BOTH, VERSIONS, found

DISPATCH = """
import json
import sglang, torch
from sglang.srt.layers.quantization.quark.quark import QuarkConfig

FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
INT4 = {"dtype": "int4", "qscheme": "per_channel", "ch_axis": 0, "is_dynamic": False}
DYNAMIC = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": True}

def config(weight, inputs):
    layer = {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None}
    return QuarkConfig.from_config({
        "quant_method": "quark", "packed_modules_mapping": {}, "global_quant_config": layer,
        "layer_quant_config": {}, "layer_type_quant_config": {},
        "exclude": [f"language_model.model.layers.0.mlp.{name}" for name in ("gate_proj", "up_proj")] + ["*lm_head"],
        "export": {"kv_cache_group": [], "pack_method": "reorder"},
    })

ours = config([FP8, INT4], DYNAMIC)
other = config(FP8, DYNAMIC)
module = torch.nn.Module()
from sglang.srt.layers.quantization.quark.utils import should_ignore_layer
def scheme(c):
    return type(c.get_moe_scheme(module, "language_model.model.layers.1.mlp.experts")).__name__
def ignored(c, name):
    return should_ignore_layer(name, ignore=c.exclude_layers, fused_mapping=c.packed_modules_mapping)
try:
    ours.get_linear_scheme(module, "language_model.model.layers.1.self_attn.o_proj")
    refused = ""
except Exception as error:
    refused = str(error)
print(json.dumps({
    "version": sglang.__version__,
    "ours": [type(ours).__name__, scheme(ours)],
    "other": [type(other).__name__, scheme(other)],
    "fused_mlp_excluded": ignored(ours, "language_model.model.layers.0.mlp.gate_up_proj"),
    "glob_excluded": ignored(ours, "language_model.lm_head"),
    "expert_excluded": ignored(ours, "language_model.model.layers.1.mlp.experts"),
    "refused": refused,
}))
"""
NCCL = """
import json
import torch
from sglang.srt.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
torch.version.cuda = "13.0"  # as in a CUDA build
try:
    NCCLLibrary()
except ValueError as error:
    print(json.dumps({"refused": str(error)}))
"""


@BOTH
def test_w4a8_gets_our_scheme_and_others_sglangs(newest: bool) -> None:
    facts = found(DISPATCH, newest)
    assert facts["version"] == VERSIONS[newest]
    assert facts["ours"] == ["W4A8QuarkConfig", "QuarkW4A8MoE"]
    assert facts["other"] == ["QuarkConfig", "QuarkW8A8FP8MoE"]
    assert facts["fused_mlp_excluded"] and facts["glob_excluded"] and not facts["expert_excluded"]
    assert "not excluded from W4A8 quantization" in facts["refused"]


@BOTH
def test_ranks_on_a_cpu_do_without_the_nccl_of_a_cuda_build(newest: bool) -> None:
    assert found(NCCL, newest) == {"refused": "an engine on a CPU has no NCCL"}

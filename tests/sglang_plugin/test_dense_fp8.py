"""Which layers become FP8, what they compute, and what is served without it, on both releases."""

from __future__ import annotations

from support.sglang_program import BOTH, found

PROGRAM = """
import json, os
from types import SimpleNamespace
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from kimi_w4a8_eagle3.sglang_plugin import hooks
from kimi_w4a8_eagle3.sglang_plugin.model import dense_fp8

group = SimpleNamespace(rank_in_group=0)
dense_fp8.get_tp_group = lambda: group
said = []
hooks.logger = SimpleNamespace(warning=lambda text, *args: said.append(text % args))
ATTENTION = {"fused_qkv_a_proj_with_mqa": (96, 64), "q_b_proj": (64, 48), "kv_b_proj": (64, 32), "o_proj": (64, 32)}
MLP = {"gate_up_proj": (64, 64), "down_proj": (64, 32)}

def linear(n, k):
    layer = torch.nn.Module()
    weight = torch.randn(n, k, generator=generator) * torch.logspace(-2, 2, n)[:, None]  # a scale for each channel
    layer.weight = torch.nn.Parameter(weight.bfloat16(), requires_grad=False)
    layer.quant_method = UnquantizedLinearMethod()
    return layer

def module(**children):
    parent = torch.nn.Module()
    for name, child in children.items():
        parent.add_module(name, child)
    return parent

def linears(shapes):
    return {name: linear(*shape) for name, shape in shapes.items()}

def layer(first):
    mlp = linears(MLP) if first else {"gate": linear(8, 64), "experts": module(w=linear(64, 64)),
                                      "shared_experts": module(**linears(MLP))}
    attention = linears(ATTENTION)
    return module(self_attn=module(indexer=module(wk=linear(64, 64)), **attention), mlp=module(**mlp))

def target():
    layers = torch.nn.ModuleList([layer(True), layer(False)])
    return module(model=module(embed_tokens=linear(8, 64), layers=layers), lm_head=linear(8, 64))

def served(change=lambda model: None, gate="all", draft=False, rank=0, model=target):
    global generator
    generator = torch.Generator().manual_seed(0)
    os.environ.pop("KIMI_DENSE_FP8", None)
    if gate:
        os.environ["KIMI_DENSE_FP8"] = gate
    language = model()
    whole = module(language_model=language, vision_tower=module(encoder=linear(64, 64)))
    change(language)
    group.rank_in_group = rank
    del said[:], hooks.missing_features[:]
    dense_fp8.quantize_target(None, SimpleNamespace(is_draft_worker=draft, model=whole))
    kinds = {name: str(one.weight.dtype) for name, one in whole.named_modules() if hasattr(one, "weight")}
    return whole, [sorted(name for name, kind in kinds.items() if "float8" in kind), list(said),
                   list(hooks.missing_features)]

def stored(model):  # as a checkpoint whose shared experts are MXFP4, in BF16 after loading
    model.model.layers[1].mlp.shared_experts.down_proj.quant_method = object()

def errors(model):
    torch.manual_seed(0)
    found = []
    for name, fp8 in model.named_modules():
        if isinstance(getattr(fp8, "quant_method", None), dense_fp8.Fp8Linear):
            stored = plain.get_submodule(name)
            x = torch.randn(5, fp8.weight.shape[1]).bfloat16()
            both = in_prefill.get_submodule(name)
            for mode, alike in (("TARGET_VERIFY", stored), ("DECODE", stored), ("EXTEND", fp8)):
                dense_fp8.note_pass(None, None, None, SimpleNamespace(forward_mode=ForwardMode[mode]))
                assert torch.equal(both.quant_method.apply(both, x), alike.quant_method.apply(alike, x))
            want = stored.quant_method.apply(stored, x).float()
            got = fp8.quant_method.apply(fp8, x).float()
            size = x.float().abs() @ stored.weight.float().abs().t()
            found.append(float(((got - want).abs() / size).max()))
            assert fp8.weight_scale.shape == (len(fp8.weight), 1) and got.shape == want.shape
            bias = torch.ones(len(fp8.weight)).bfloat16()
            assert torch.equal(fp8.quant_method.apply(fp8, x, bias), fp8.quant_method.apply(fp8, x) + bias)
    return found

plain, off = served(gate=None)
quantized, on = served()
in_prefill, _ = served(gate="prefill")
shapes = [(2112, 7168), (1536, 1536), (2048, 512), (7168, 1024), (512, 7168), (7168, 256), (4608, 7168), (7168, 2304)]
dense_fp8.is_fp8_fnuz = lambda: True
os.environ["SGLANG_USE_AITER"] = "1"
kernels = [dense_fp8._no_kernel(*shape) for shape in shapes]
refused = [dense_fp8._no_kernel(*shape) for shape in ((2112 - 32, 7168), (2112, 512), (7168, 128))]
dense_fp8.is_fp8_fnuz = lambda: False
print(json.dumps({
    "off": off, "0": served(gate="off")[1], "on": on, "draft": served(draft=True)[1], "errors": errors(quantized),
    "stored": served(stored)[1], "rank 1": served(stored, rank=1)[1], "other": served(model=lambda: linear(8, 8))[1],
    "kernels": kernels, "refused": refused, "elsewhere": dense_fp8._no_kernel(512, 7168),
}))
"""
LAYERS = sorted(
    f"language_model.model.layers.{layer}.{name}"
    for layer, mlp in enumerate(("mlp", "mlp.shared_experts"))
    for name in (
        *(f"self_attn.{one}" for one in ("fused_qkv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj")),
        *(f"{mlp}.{one}" for one in ("gate_up_proj", "down_proj")),
    )
)
MISSING = ["dense products in FP8"]


@BOTH
def test_only_dense_layers_of_the_target_become_fp8(newest: bool) -> None:
    """Router, experts, embedding, output head, indexer, vision tower and draft stay."""
    answers = found(PROGRAM, newest)
    assert answers["on"] == [LAYERS, [], []]
    assert answers["off"] == answers["0"] == answers["draft"] == [[], [], []]


@BOTH
def test_they_compute_what_they_did_within_the_error_of_fp8(newest: bool) -> None:
    """Rows of the weights are up to 10,000 times as large as others: one scale for all would lose the small ones."""
    errors = found(PROGRAM, newest)["errors"]
    assert len(errors) == len(LAYERS)
    assert all(0 < error < (1 + 1 / 16) ** 2 - 1 + 0.01 for error in errors)  # both factors to 3 bits; small ones, BF16


@BOTH
def test_what_is_served_without_it_says_so_once(newest: bool) -> None:
    answers = found(PROGRAM, newest)
    changed, said, missing = answers["stored"]
    assert changed == [] and missing == MISSING
    name = "model.layers.1.mlp.shared_experts.down_proj"
    assert said == [f"serving without dense products in FP8: the checkpoint has {name} quantized"]
    assert answers["rank 1"] == [[], [], MISSING]  # rank 0 says it
    assert answers["other"][::2] == [[], MISSING] and "no dense layers" in answers["other"][1][0]


@BOTH
def test_aiter_has_a_kernel_for_every_layer_of_kimi_at_tp_8(newest: bool) -> None:
    answers = found(PROGRAM, newest)
    assert answers["kernels"] == [None] * 8 and None not in answers["refused"]
    assert "a multiple of 64 and of 64" in answers["refused"][0] and "gfx942" in answers["elsewhere"]

"""Checks of a W4A8 target: every routed expert has the config's format, and nothing else is quantized otherwise."""

from __future__ import annotations

import re

from .config import ModelConfig, TextShape
from .findings import Findings, Problem
from .packing import NIBBLES_PER_WORD
from .quantization import QuantizationConfig, is_glob
from .safetensors_header import Checkpoint, TensorInfo
from .weight_format import INT4, MXFP4, WeightFormat

_REQUANTIZE = "quantize the model again (`kimi-w4a8 quantize`) or fetch the published checkpoint"
Tensors = dict[str, tuple[tuple[str, ...], tuple[tuple[int, ...], ...], str]]
_EXPERT = re.compile(r"\.mlp\.experts\.\d+\.\w+$")
_MLP = re.compile(r"\.mlp\.(shared_experts\.)?(gate|up|down)_proj\.weight$")
_LINEAR = re.compile(r"\.layers\.\d+\..*_proj(_with_mqa)?$|(^|\.)lm_head$")
_FLOATS = ("F16", "BF16", "F32", "F64")
_GRANULES = {INT4: "eight INT4 values in each word", MXFP4: "whole blocks of 32 MXFP4 values"}


def check_config(config: ModelConfig, weights: WeightFormat, where: str) -> list[Problem]:
    """Check pack_method and the formats of single layers, and that reduction sizes fill whole words or blocks."""
    findings = Findings("format")
    quantization = config.quantization
    export = quantization.export if quantization else None
    method = export.pack_method if export else None
    if weights == INT4 and method != "reorder":
        findings.add(f"pack_method is {method!r}", where, "export.pack_method: 'reorder'", _REQUANTIZE)
    for name, layer in ((quantization.layer_quant_config if quantization else None) or {}).items():
        if layer.stages and layer.weight_format != weights:
            kinds = ", then ".join(map(str, layer.stages))
            found = f"layer_quant_config gives {name} another format: {kinds}"
            findings.add(found, where, f"{weights} for every quantized layer", _REQUANTIZE)
    sizes = {"hidden_size": config.text.hidden_size, "moe_intermediate_size": config.text.moe_intermediate_size or 0}
    for name, size in sizes.items():
        if size % granule(weights):
            found = f"K = {name} = {size} is not a multiple of {granule(weights)}"
            findings.add(found, where, _GRANULES[weights])
    if not config.text.moe_layers:
        findings.add("the model has no routed experts to quantize", where, "n_routed_experts and moe_intermediate_size")
    return findings.problems()


def refused_format(quantization: QuantizationConfig, where: str) -> list[Problem]:
    """Report 4- and 6-bit floats in blocks that are not Quark's MXFP4: no kernel on gfx942 reads them."""
    findings = Findings("format")
    stages = quantization.global_quant_config.stages if quantization.global_quant_config else []
    expected = "Quark's INT4 per channel, or its fp4 per_group, group size 32, scales e8m0"
    if any(stage.is_micro for stage in stages):
        findings.add(f"experts are stored as {', then '.join(map(str, stages))}", where, expected, _REQUANTIZE)
    elif "fp4" in (quantization.format or ""):
        found = f"experts are stored by {quantization.quant_method} as {quantization.format}"
        findings.add(found, where, expected, _REQUANTIZE)
    return findings.problems()


def granule(weights: WeightFormat) -> int:
    """Return how many values of K are stored together: a word of INT4, a block of MXFP4."""
    return weights.block or NIBBLES_PER_WORD


def check_experts(checkpoint: Checkpoint, shape: TextShape, weights: WeightFormat) -> list[Problem]:
    """Check presence, dtype and shape of every routed expert's weights and scales."""
    findings = Findings("experts")
    hidden, inter = shape.hidden_size, shape.moe_intermediate_size or 0
    sizes = {"gate_proj": (inter, hidden), "up_proj": (inter, hidden), "down_proj": (hidden, inter)}
    for layer in shape.moe_layers:
        for expert in range(shape.n_routed_experts):
            for projection, (rows, columns) in sizes.items():
                name = f"{checkpoint.text_prefix}layers.{layer}.mlp.experts.{expert}.{projection}"
                _check_projection(checkpoint, name, _wanted(weights, rows, columns), findings)
    return findings.problems()


def glob_notes(quantization: QuantizationConfig) -> list[str]:
    """Return a sentence about globs in the exclude list, which this package and other loaders read differently."""
    globs = [entry for entry in quantization.exclude or [] if is_glob(entry)]
    if not globs:
        return []
    return [f"the exclude list has globs ({', '.join(globs)}): this package applies them, SGLang alone ignores them"]


def check_excludes(
    checkpoint: Checkpoint, quantization: QuantizationConfig, weights: WeightFormat, where: str
) -> list[Problem]:
    """Check the exclude list: routed experts must be quantized, other linear layers excluded and not quantized.

    MLPs may be MXFP4 too, as in amd/Kimi-K2.5-MXFP4; the engine loads them as BF16, which holds MXFP4 exactly.
    """
    findings = Findings("excludes")
    excludes = quantization.excludes()
    for name, tensor in checkpoint.tensors.items():
        module = name.removesuffix(".weight")
        if module == name:
            continue
        excluded = module in excludes
        quantized = f"{module}.weight_scale" in checkpoint.tensors or tensor.dtype not in _FLOATS
        if _EXPERT.search(module):
            if excluded:
                findings.add("routed expert is in the exclude list", where, "all experts quantized", _REQUANTIZE, name)
        elif quantized and excluded:
            found, expected = (
                f"excluded layer is quantized ({tensor.dtype})",
                "BF16, as quantization_config.exclude says",
            )
            findings.add(found, tensor.file, expected, _REQUANTIZE, name)
        elif quantized and not (weights.block and _is_mx_mlp(checkpoint, tensor, weights.block)):
            found = f"layer outside the routed experts is quantized ({tensor.dtype})"
            remedy = "quantize again with this layer excluded"
            findings.add(found, tensor.file, "only routed experts in W4A8", remedy, name)
        elif not quantized and _LINEAR.search(module) and not excluded:
            found = f"layer is neither quantized ({tensor.dtype}) nor excluded"
            remedy = "add the name to the exclude list, or quantize again"
            findings.add(found, where, "its name in quantization_config.exclude", remedy, name)
    return findings.problems()


def check_tensor_parallel(shape: TextShape, tp: int, where: str, weights: WeightFormat = INT4) -> list[Problem]:
    """Check that each rank gets an equal part of heads, rows of gate/up and whole packed words or blocks of down."""
    findings = Findings("tensor-parallel")
    sizes = {"num_attention_heads": shape.num_attention_heads, "intermediate_size": shape.intermediate_size or 0}
    inter = shape.moe_intermediate_size or 0
    if shape.moe_layers:
        sizes["moe_intermediate_size"] = inter
    for name, size in sizes.items():
        if size % tp:
            expected = f"a multiple of the tensor-parallel size {tp}"
            findings.add(f"TP {tp} does not divide {name} = {size}", where, expected, "choose another --tp")
    if shape.moe_layers and inter % tp == 0 and inter // tp % granule(weights):
        found = (
            f"TP {tp} cuts a {'block' if weights.block else 'packed word'} of down_proj: {inter} / {tp} = {inter // tp}"
        )
        expected = f"a multiple of {granule(weights)} {weights} values on each rank"
        findings.add(f"{found} columns a rank", where, expected, "choose a smaller --tp")
    return findings.problems()


def _is_mx_mlp(checkpoint: Checkpoint, weight: TensorInfo, block: int) -> bool:
    """Return True for the weight of a dense or shared-expert MLP in MXFP4, complete with its scales."""
    scale = checkpoint.tensors.get(f"{weight.name}_scale")
    return (
        _MLP.search(weight.name) is not None
        and (weight.dtype, len(weight.shape)) == ("U8", 2)
        and scale is not None
        and scale.shape == (weight.shape[0], weight.shape[1] * 2 // block)
    )


def _wanted(weights: WeightFormat, rows: int, columns: int) -> Tensors:
    """Return the dtypes and shapes of the tensors of a projection [rows, columns], and their description."""
    if block := weights.block:
        packed, blocks = -(-columns // 2), -(-columns // block)
        scale = f"U8 [{rows}, {columns}/{block} = {blocks}]"
        return {
            "weight": (("U8",), ((rows, packed),), f"U8 [{rows}, {columns}/2 = {packed}]"),
            "weight_scale": (("U8", "F8_E8M0"), ((rows, blocks),), f"one E8M0 scale for {block} values, {scale}"),
        }
    words = -(-columns // NIBBLES_PER_WORD)
    return {
        "weight": (("I32",), ((rows, words),), f"I32 [{rows}, {columns}/8 = {words}]"),
        # Quark writes BF16 here unless its FP8 stage asks for a float32 scale; the loader converts it.
        "weight_scale": (("F32", "BF16"), ((), (1,)), "F32 [] or [1]"),
        "weight_scale_2": (("F32",), ((rows,),), f"F32 [{rows}]"),
    }


def _check_projection(checkpoint: Checkpoint, name: str, wanted: Tensors, findings: Findings) -> None:
    weight = checkpoint.tensors.get(f"{name}.weight")
    if weight is not None and weight.dtype in _FLOATS:
        expected = f"{wanted['weight'][0][0]} codes"
        findings.add(f"expert is not quantized ({weight.dtype})", weight.file, expected, _REQUANTIZE, weight.name)
        return
    for kind, (dtypes, shapes, expected) in wanted.items():
        full_name = f"{name}.{kind}"
        tensor = checkpoint.tensors.get(full_name)
        if tensor is not None and (tensor.dtype not in dtypes or tensor.shape not in shapes):
            found = f"{kind} is {tensor.dtype} {list(tensor.shape)}"
            findings.add(found, tensor.file, expected, _REQUANTIZE, full_name)
        elif tensor is None and full_name not in checkpoint.unread:
            expected = "one for each expert projection"
            findings.add(f"{kind} is missing", checkpoint.directory, expected, _REQUANTIZE, full_name)

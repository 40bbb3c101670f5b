"""Checks of a W4A8 target: every routed expert has the published format, and nothing else is quantized."""

from __future__ import annotations

import re

from .config import ModelConfig, QuantizationConfig, TextShape, is_glob
from .findings import Findings, Problem
from .packing import NIBBLES_PER_WORD
from .safetensors_header import Checkpoint

_REQUANTIZE = "quantize the model again (`kimi-w4a8 quantize`) or fetch the published checkpoint"
_EXPERT = re.compile(r"\.mlp\.experts\.\d+\.\w+$")
_LINEAR = re.compile(r"\.layers\.\d+\..*_proj(_with_mqa)?$|(^|\.)lm_head$")
_FLOATS = ("F16", "BF16", "F32", "F64")


def check_config(config: ModelConfig, where: str) -> list[Problem]:
    """Check pack_method, and that reduction sizes fill whole words of eight INT4 values."""
    findings = Findings("format")
    export = config.quantization.export if config.quantization else None
    method = export.pack_method if export else None
    if method != "reorder":
        findings.add(f"pack_method is {method!r}", where, "export.pack_method: 'reorder'", _REQUANTIZE)
    sizes = {"hidden_size": config.text.hidden_size, "moe_intermediate_size": config.text.moe_intermediate_size or 0}
    for name, size in sizes.items():
        if size % NIBBLES_PER_WORD:
            found = f"K = {name} = {size} is not a multiple of {NIBBLES_PER_WORD}"
            findings.add(found, where, "eight INT4 values in each word")
    if not config.text.moe_layers:
        findings.add("the model has no routed experts to quantize", where, "n_routed_experts and moe_intermediate_size")
    return findings.problems()


def check_experts(checkpoint: Checkpoint, shape: TextShape) -> list[Problem]:
    """Check presence, dtype and shape of `weight`, `weight_scale` and `weight_scale_2` of every routed expert."""
    findings = Findings("experts")
    hidden, inter = shape.hidden_size, shape.moe_intermediate_size or 0
    sizes = {"gate_proj": (inter, hidden), "up_proj": (inter, hidden), "down_proj": (hidden, inter)}
    prefix = text_prefix(checkpoint)
    for layer in shape.moe_layers:
        for expert in range(shape.n_routed_experts):
            for projection, (rows, columns) in sizes.items():
                name = f"{prefix}layers.{layer}.mlp.experts.{expert}.{projection}"
                _check_projection(checkpoint, name, rows, columns, findings)
    return findings.problems()


def glob_notes(quantization: QuantizationConfig) -> list[str]:
    """Return a sentence about globs in the exclude list, which this package and other loaders read differently."""
    globs = [entry for entry in quantization.exclude or [] if is_glob(entry)]
    if not globs:
        return []
    return [f"the exclude list has globs ({', '.join(globs)}): this package applies them, SGLang alone ignores them"]


def check_excludes(checkpoint: Checkpoint, quantization: QuantizationConfig, where: str) -> list[Problem]:
    """Check the exclude list: routed experts must be quantized, other linear layers excluded and not quantized."""
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
        elif quantized:
            found = f"layer outside the routed experts is quantized ({tensor.dtype})"
            remedy = "quantize again with this layer excluded"
            findings.add(found, tensor.file, "only routed experts in W4A8", remedy, name)
        elif _LINEAR.search(module) and not excluded:
            found = f"layer is neither quantized ({tensor.dtype}) nor excluded"
            remedy = "add the name to the exclude list, or quantize again"
            findings.add(found, where, "its name in quantization_config.exclude", remedy, name)
    return findings.problems()


def check_tensor_parallel(shape: TextShape, tp: int, where: str) -> list[Problem]:
    """Check that each rank gets an equal part of heads, rows of gate/up and whole packed words of down."""
    findings = Findings("tensor-parallel")
    sizes = {"num_attention_heads": shape.num_attention_heads, "intermediate_size": shape.intermediate_size or 0}
    inter = shape.moe_intermediate_size or 0
    if shape.moe_layers:
        sizes["moe_intermediate_size"] = inter
    for name, size in sizes.items():
        if size % tp:
            expected = f"a multiple of the tensor-parallel size {tp}"
            findings.add(f"TP {tp} does not divide {name} = {size}", where, expected, "choose another --tp")
    if shape.moe_layers and inter % tp == 0 and inter // tp % NIBBLES_PER_WORD:
        found = f"TP {tp} cuts a packed word of down_proj: {inter} / {tp} = {inter // tp} columns a rank"
        findings.add(found, where, "a multiple of 8 INT4 values on each rank", "choose a smaller --tp")
    return findings.problems()


def text_prefix(checkpoint: Checkpoint) -> str:
    """Return the prefix of `layers.` in the text model's tensor names."""
    wrapped = any(name.startswith("language_model.") for name in checkpoint.tensors)
    return "language_model.model." if wrapped else "model."


def _check_projection(checkpoint: Checkpoint, name: str, rows: int, columns: int, findings: Findings) -> None:
    weight = checkpoint.tensors.get(f"{name}.weight")
    if weight is not None and weight.dtype in _FLOATS:
        findings.add(f"expert is not quantized ({weight.dtype})", weight.file, "I32 words", _REQUANTIZE, weight.name)
        return
    words = -(-columns // NIBBLES_PER_WORD)
    wanted = {
        "weight": (("I32",), ((rows, words),), f"I32 [{rows}, {columns}/8 = {words}]"),
        # Quark writes BF16 here unless its FP8 stage asks for a float32 scale; the loader converts it.
        "weight_scale": (("F32", "BF16"), ((), (1,)), "F32 [] or [1]"),
        "weight_scale_2": (("F32",), ((rows,),), f"F32 [{rows}]"),
    }
    for kind, (dtypes, shapes, expected) in wanted.items():
        full_name = f"{name}.{kind}"
        tensor = checkpoint.tensors.get(full_name)
        if tensor is not None and (tensor.dtype not in dtypes or tensor.shape not in shapes):
            found = f"{kind} is {tensor.dtype} {list(tensor.shape)}"
            findings.add(found, tensor.file, expected, _REQUANTIZE, full_name)
        elif tensor is None and full_name not in checkpoint.unread:
            expected = "one for each expert projection"
            findings.add(f"{kind} is missing", checkpoint.directory, expected, _REQUANTIZE, full_name)

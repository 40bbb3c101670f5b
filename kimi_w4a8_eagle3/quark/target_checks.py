"""Checks of a W4A8 target, without its weight matrices.

Every routed expert has the config's format, and nothing else is quantized otherwise. The vision tower is whole, because
SGLang would start without its weights and see noise. Norms, scales and routers hold no NaN or Inf.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..base.errors import KimiError
from ..base.finding import Finding, Severity
from .config import ExcludeRules, QuantizationConfig, TextShape
from .quantization import is_glob
from .safetensors_header import Checkpoint, TensorInfo
from .weight_format import INT4, NIBBLES_PER_WORD, WeightFormat

_EXAMPLES = 3


@dataclass(frozen=True)
class Problem(Finding):
    """One kind of mistake in a checkpoint, with the names of its first tensors and the `count` of all of them."""

    severity: Severity = Severity.FAIL
    tensors: tuple[str, ...] = ()
    count: int = 1

    @classmethod
    def of(cls, check: str, error: KimiError) -> Problem:
        """Return the problem that an error describes."""
        return cls(error.what, name=check, where=error.where, expected=error.expected, remedy=error.remedy)

    @property
    def message(self) -> str:
        """The problem with the names of its first tensors."""
        rest = f" and {self.count - len(self.tensors):,} more" if self.count > len(self.tensors) else ""
        return f"{self.found}: {', '.join(self.tensors)}{rest}" if self.tensors else self.found

    def error(self) -> KimiError:
        return replace(super().error(), what=self.message)


class Findings:
    """Collects the problems of one check; those that differ only in the tensor become one.

    where, remedy: of problems that name none. A tensor of a file brings its file.
    """

    def __init__(self, check: str, where: Path, remedy: str = "") -> None:
        self._new = Problem("", name=check, where=str(where), remedy=remedy, count=0)
        self._problems: dict[tuple[str, str], Problem] = {}

    def add(self, what: str, expected: str, tensor: TensorInfo | str = "", remedy: str = "") -> None:
        """Add a mistake, if it concerns one in a tensor or in a name of one."""
        name, where = (tensor.name, str(tensor.file)) if isinstance(tensor, TensorInfo) else (tensor, self._new.where)
        new = replace(self._new, found=what, expected=expected, where=where, remedy=remedy or self._new.remedy)
        problem = self._problems.get((what, expected), new)
        more = (name,) if name and len(problem.tensors) < _EXAMPLES else ()
        self._problems[what, expected] = replace(problem, count=problem.count + 1, tensors=problem.tensors + more)

    def problems(self) -> list[Problem]:
        """Return all problems in the order in which they were first seen."""
        return list(self._problems.values())


_REQUANTIZE = "quantize the model again (`kimi-w4a8 quantize`) or fetch the published checkpoint"
Tensors = dict[str, tuple[tuple[str, ...], tuple[tuple[int, ...], ...], str]]
_EXPERT = re.compile(r"\.mlp\.experts\.\d+\.\w+$")
_MLP = re.compile(r"\.mlp\.(shared_experts\.)?(gate|up|down)_proj\.weight$")
_LINEAR = re.compile(r"\.layers\.\d+\..*_proj(_with_mqa)?$|(^|\.)lm_head$")
_FLOATS = ("F16", "BF16", "F32", "F64")


def check_config(quantization: QuantizationConfig, text: TextShape, weights: WeightFormat, where: Path) -> Findings:
    """Check pack_method and the formats of single layers, and that reduction sizes fill whole words or blocks."""
    findings = Findings("format", where, _REQUANTIZE)
    method = quantization.export.pack_method if quantization.export else None
    if weights == INT4 and method != "reorder":
        findings.add(f"pack_method is {method!r}", "export.pack_method: 'reorder'")
    for name, layer in (quantization.layer_quant_config or {}).items():
        if layer.stages and layer.weight_format != weights:
            kinds = ", then ".join(map(str, layer.stages))
            found = f"layer_quant_config gives {name} another format: {kinds}"
            findings.add(found, f"{weights} for every quantized layer")
    whole = _granule(weights)
    for name, size in (("hidden_size", text.hidden_size), ("moe_intermediate_size", text.moe_intermediate_size or 0)):
        if size % whole:
            findings.add(f"K = {name} = {size} is not a multiple of {whole}", f"whole groups of {whole} values")
    if not text.moe_layers:
        findings.add("the model has no routed experts to quantize", "n_routed_experts and moe_intermediate_size")
    return findings


def refused_format(quantization: QuantizationConfig, where: Path) -> Findings:
    """Report 4- and 6-bit floats in blocks that are not Quark's MXFP4: no kernel on gfx942 reads them."""
    findings = Findings("format", where, _REQUANTIZE)
    stages = quantization.global_quant_config.stages if quantization.global_quant_config else []
    stored = f"experts are stored as {', then '.join(map(str, stages))}"
    if not any(stage.is_micro for stage in stages):
        stored = f"experts are stored by {quantization.quant_method} as {quantization.format}"
    if any(stage.is_micro for stage in stages) or "fp4" in (quantization.format or ""):
        findings.add(stored, "Quark's INT4 per channel, or its fp4 per_group, group size 32, scales e8m0")
    return findings


def _granule(weights: WeightFormat) -> int:
    """Return how many values of K are stored together: a word of INT4, a block of MXFP4."""
    return weights.block or NIBBLES_PER_WORD


def check_experts(checkpoint: Checkpoint, shape: TextShape, weights: WeightFormat) -> Findings:
    """Check presence, dtype and shape of every routed expert's weights and scales."""
    findings = Findings("experts", checkpoint.directory, _REQUANTIZE)
    hidden, inter = shape.hidden_size, shape.moe_intermediate_size or 0
    wide, narrow = _wanted(weights, inter, hidden), _wanted(weights, hidden, inter)
    prefix = checkpoint.text_prefix  # looks through all names
    for layer in shape.moe_layers:
        for expert in range(shape.n_routed_experts):
            for projection, wanted in (("gate_proj", wide), ("up_proj", wide), ("down_proj", narrow)):
                name = f"{prefix}layers.{layer}.mlp.experts.{expert}.{projection}"
                _check_projection(checkpoint, name, wanted, findings)
    return findings


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
        findings.add(f"expert is not quantized ({weight.dtype})", f"{wanted['weight'][0][0]} codes", weight)
        return
    for kind, (dtypes, shapes, expected) in wanted.items():
        full_name = f"{name}.{kind}"
        tensor = checkpoint.tensors.get(full_name)
        if tensor is not None and (tensor.dtype not in dtypes or tensor.shape not in shapes):
            findings.add(f"{kind} is {tensor.dtype} {list(tensor.shape)}", expected, tensor)
        elif tensor is None and full_name not in checkpoint.unread:
            findings.add(f"{kind} is missing", "one for each expert projection", full_name)


def glob_notes(quantization: QuantizationConfig) -> list[str]:
    """Return a sentence about globs in the exclude list, which this package and other loaders read differently."""
    globs = ", ".join(entry for entry in quantization.exclude or [] if is_glob(entry))
    return [f"the exclude list has globs ({globs}): this package applies them, SGLang alone ignores them"] * bool(globs)


def check_excludes(
    checkpoint: Checkpoint, quantization: QuantizationConfig, weights: WeightFormat, where: Path
) -> Findings:
    """Check the exclude list: routed experts must be quantized, other linear layers excluded and not quantized.

    MLPs may be MXFP4 too, as in amd/Kimi-K2.5-MXFP4; the engine loads them as BF16, which holds MXFP4 exactly.
    """
    findings = Findings("excludes", where, _REQUANTIZE)
    excludes = ExcludeRules(quantization.exclude or [])
    for name, tensor in checkpoint.tensors.items():
        module = name.removesuffix(".weight")
        if module == name:
            continue
        excluded = module in excludes
        quantized = f"{module}.weight_scale" in checkpoint.tensors or tensor.dtype not in _FLOATS
        if _EXPERT.search(module):
            if excluded:
                findings.add("routed expert is in the exclude list", "all experts quantized", name)
        elif quantized and excluded:
            found = f"excluded layer is quantized ({tensor.dtype})"
            findings.add(found, "BF16, as quantization_config.exclude says", tensor)
        elif quantized and not (weights.block and _is_mx_mlp(checkpoint, tensor, weights.block)):
            found = f"layer outside the routed experts is quantized ({tensor.dtype})"
            findings.add(found, "only routed experts in W4A8", tensor, "quantize again with this layer excluded")
        elif not quantized and _LINEAR.search(module) and not excluded:
            found, expected = (
                f"layer is neither quantized ({tensor.dtype}) nor excluded",
                "its name in the exclude list",
            )
            findings.add(found, expected, name, "add the name to quantization_config.exclude, or quantize again")
    return findings


def _is_mx_mlp(checkpoint: Checkpoint, weight: TensorInfo, block: int) -> bool:
    """Return True for the weight of an MLP in MXFP4, complete with its scales."""
    scale = checkpoint.tensors.get(f"{weight.name}_scale")
    return (
        _MLP.search(weight.name) is not None
        and (weight.dtype, len(weight.shape)) == ("U8", 2)
        and scale is not None
        and scale.shape == (weight.shape[0], weight.shape[1] * 2 // block)
    )


def check_tensor_parallel(shape: TextShape, tp: int, where: Path, weights: WeightFormat = INT4) -> Findings:
    """Check that each rank gets an equal part of heads, rows of gate/up and whole packed words or blocks of down."""
    findings = Findings("tensor-parallel", where, "choose another --tp")
    inter = (shape.moe_intermediate_size or 0) if shape.moe_layers else 0
    sizes = {"num_attention_heads": shape.num_attention_heads, "intermediate_size": shape.intermediate_size or 0}
    for name, size in {**sizes, "moe_intermediate_size": inter}.items():
        if size % tp:
            findings.add(f"TP {tp} does not divide {name} = {size}", f"a multiple of the tensor-parallel size {tp}")
    if inter % tp == 0 and inter // tp % _granule(weights):
        cut = f"TP {tp} cuts a {'block' if weights.block else 'packed word'} of down_proj"
        expected = f"moe_intermediate_size / TP a multiple of {_granule(weights)}"
        findings.add(f"{cut}: {inter} / {tp} = {inter // tp} columns a rank", expected)
    return findings


def check_tower(checkpoint: Checkpoint, layers: int) -> Findings:
    """Check that a Kimi-K2.5 vision tower has `layers` layers with the same tensors, and all other parts."""
    remedy = "fetch the checkpoint again; for text alone `language_model_only: true` in config.json"
    findings = Findings("vision tower", checkpoint.directory, remedy)
    found = {*checkpoint.tensors, *checkpoint.unread}
    blocks = [re.fullmatch(r"vision_tower\.encoder\.blocks\.\d+\.(.+)", name) for name in found]
    inner = sorted({block[1] for block in blocks if block} | {f"norm{n}.{kind}" for n in "01" for kind in _KINDS})
    wanted = [f"vision_tower.encoder.blocks.{layer}.{name}" for layer in range(layers) for name in inner]
    wanted += ["vision_tower.patch_embed.pos_emb.weight"]
    wanted += [f"{module}.{kind}" for module in _ONCE for kind in _KINDS]
    for name in wanted:
        if name not in found and name.replace("linear_1", "proj.0").replace("linear_2", "proj.2") not in found:
            findings.add("weight of the vision tower is missing", f"a tower of {layers} layers, as config.json", name)
    return findings


_KINDS = ("weight", "bias")
_ONCE = (
    "vision_tower.patch_embed.proj", "vision_tower.encoder.final_layernorm", "mm_projector.pre_norm",
    "mm_projector.linear_1", "mm_projector.linear_2",
)  # fmt: skip

# Kimi-K2.5's router has 5.5 MB a layer. All tensors up to this size are 2 GB of its 534, and with MXFP4's scales 34.
SMALL = 8 << 20
# Unsigned integers of the same size, and the bits that are all ones in NaN and Inf.
_NON_FINITE = {
    "F64": ("<u8", 0x7FF0000000000000),
    "F32": ("<u4", 0x7F800000),
    "BF16": ("<u2", 0x7F80),
    "F16": ("<u2", 0x7C00),
    "F8_E4M3": ("u1", 0x7F),
    "F8_E5M2": ("u1", 0x7C),
    "F8_E8M0": ("u1", 0xFF),
}
_READERS = 8


def check_small_tensors(checkpoint: Checkpoint) -> tuple[list[Problem], int]:
    """Find NaN and Inf in tensors of at most 8 MiB; return the problems and the number of tensors that were read.

    One NaN in a norm makes every answer of the model empty.
    """
    small = [t for t in checkpoint.tensors.values() if t.nbytes <= SMALL and _dtype(t) in _NON_FINITE]
    remedy = "check the files with `kimi-w4a8 fetch --verify`; if they are right, do not use this checkpoint"
    findings = Findings("values", checkpoint.directory, remedy)
    for tensor, count in find_non_finite(small):
        found = f"NaN or Inf in {count:,} of {math.prod(tensor.shape):,} values"
        findings.add(found, "finite values", tensor)
    return findings.problems(), len(small)


def find_non_finite(tensors: Iterable[TensorInfo]) -> list[tuple[TensorInfo, int]]:
    """Return the tensors that contain NaN or Inf, with the number of such values."""

    def count(tensor: TensorInfo) -> tuple[TensorInfo, int]:
        integer, ones = _NON_FINITE[_dtype(tensor)]
        with tensor.file.open("rb") as file:
            values = np.frombuffer(os.pread(file.fileno(), tensor.nbytes, tensor.start), integer)
        return tensor, int(np.count_nonzero((values & ones) == ones))

    in_order = sorted(tensors, key=lambda tensor: (str(tensor.file), tensor.start))
    with ThreadPoolExecutor(_READERS) as pool:
        return [found for found in pool.map(count, in_order) if found[1]]


def _dtype(tensor: TensorInfo) -> str:
    """Return the dtype of a tensor; Quark stores E8M0 scales as plain bytes."""
    return "F8_E8M0" if tensor.dtype == "U8" and tensor.name.endswith(".weight_scale") else tensor.dtype

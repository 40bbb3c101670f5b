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

import numpy as np

from ..base.errors import KimiError
from ..base.finding import Finding, Severity
from .config import ExcludeRules, QuantizationConfig, TextShape
from .quantization import is_glob
from .safetensors_header import Checkpoint, TensorInfo
from .weight_format import INT4, MXFP4, NIBBLES_PER_WORD, WeightFormat

_EXAMPLES = 3
_SAMPLE, _SAMPLE_BYTES = 64, 1 << 18  # scale tensors of experts that are read, and bytes of their codes
EXACT_SPAN, LARGE_SCALE = 11, 147  # octaves of a row (`packing.MAX_SHIFT`); a weight of 2**20 and more


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
        if not self.tensors:
            return self.found
        rest = f" and {self.count - len(self.tensors):,} more" if self.count > len(self.tensors) else ""
        return f"{self.found}: {', '.join(self.tensors)}{rest}"

    def error(self) -> KimiError:
        return replace(super().error(), what=self.message)


class Findings:
    """Collects problems; those that differ only in the tensor become one."""

    def __init__(self, check: str) -> None:
        self.check = check
        self._problems: dict[tuple[str, str], Problem] = {}

    def add(self, what: str, where: object, expected: str, remedy: str = "", tensor: str | None = None) -> None:
        """Add a mistake in the file `where` and, if it concerns one, in a tensor."""
        new = Problem(what, name=self.check, where=str(where), expected=expected, remedy=remedy, count=0)
        problem = self._problems.get((what, expected), new)
        more = (tensor,) if tensor is not None and len(problem.tensors) < _EXAMPLES else ()
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
_GRANULES = {INT4: "eight INT4 values in each word", MXFP4: "whole blocks of 32 MXFP4 values"}


def check_config(quantization: QuantizationConfig, text: TextShape, weights: WeightFormat, where: str) -> list[Problem]:
    """Check pack_method and the formats of single layers, and that reduction sizes fill whole words or blocks."""
    findings = Findings("format")
    method = quantization.export.pack_method if quantization.export else None
    if weights == INT4 and method != "reorder":
        findings.add(f"pack_method is {method!r}", where, "export.pack_method: 'reorder'", _REQUANTIZE)
    for name, layer in (quantization.layer_quant_config or {}).items():
        if layer.stages and layer.weight_format != weights:
            kinds = ", then ".join(map(str, layer.stages))
            found = f"layer_quant_config gives {name} another format: {kinds}"
            findings.add(found, where, f"{weights} for every quantized layer", _REQUANTIZE)
    sizes = {"hidden_size": text.hidden_size, "moe_intermediate_size": text.moe_intermediate_size or 0}
    for name, size in sizes.items():
        if size % granule(weights):
            found = f"K = {name} = {size} is not a multiple of {granule(weights)}"
            findings.add(found, where, _GRANULES[weights])
    if not text.moe_layers:
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
    prefix = checkpoint.text_prefix  # looks through all names
    for layer in shape.moe_layers:
        for expert in range(shape.n_routed_experts):
            for projection, (rows, columns) in sizes.items():
                name = f"{prefix}layers.{layer}.mlp.experts.{expert}.{projection}"
                _check_projection(checkpoint, name, _wanted(weights, rows, columns), findings)
    return findings.problems()


def glob_notes(quantization: QuantizationConfig) -> list[str]:
    """Return a sentence about globs in the exclude list, which this package and other loaders read differently."""
    globs = [entry for entry in quantization.exclude or [] if is_glob(entry)]
    if not globs:
        return []
    return [f"the exclude list has globs ({', '.join(globs)}): this package applies them, SGLang alone ignores them"]


def block_notes(checkpoint: Checkpoint, weights: WeightFormat) -> list[str]:
    """Return sentences about MXFP4 scales and codes that trained weights do not have, from a sample of the experts."""
    found = checkpoint.tensors.values() if weights.block else ()
    stored = [t for t in found if _EXPERT.search(t.name.removesuffix(".weight_scale")) and len(t.shape) == 2]
    stored = [t for t in stored if t.name.endswith(".weight_scale") and t.dtype in ("U8", "F8_E8M0")]
    span = largest = 0
    tops, counts = np.zeros(8, int), np.zeros(16, int)  # blocks by their largest code, and codes
    for tensor in stored[:: max(1, len(stored) // _SAMPLE)]:
        scales = np.fromfile(tensor.file, "u1", tensor.nbytes, offset=tensor.start).reshape(tensor.shape).astype(int)
        most = scales.max(axis=1, keepdims=True)
        least = np.where(scales == 0, most, scales).min(axis=1, keepdims=True)  # 0 is Quark's scale of a block of zeros
        span, largest = max(span, int((most - least).max())), max(largest, int(most.max()))
        if (codes := checkpoint.tensors.get(tensor.name.removesuffix("_scale"))) and codes.nbytes == 16 * tensor.nbytes:
            some = np.fromfile(codes.file, "u1", min(codes.nbytes, _SAMPLE_BYTES), offset=codes.start)
            both = np.concatenate([some.reshape(-1, 16) & 15, some.reshape(-1, 16) >> 4], axis=1)
            tops += np.bincount((both & 7).max(1), minlength=8)
            counts += np.bincount(both.ravel(), minlength=16)
    low, away = tops[1:6].sum() / max(tops[1:].sum(), 1), abs(counts[1:8] - counts[9:]).sum() / max(counts.sum(), 1)
    notes = {
        f"MXFP4 scales of a row span {span} octaves: a layer with rows over {EXACT_SPAN} is computed in parts, "
        "which is slower": span > EXACT_SPAN,
        f"an MXFP4 scale is {largest}, 2**{largest - 127}: trained weights have none above 2**20": largest
        > LARGE_SCALE,
        f"{low:.0%} of the MXFP4 blocks have no code of 4 or 6: scales or codes may belong to other blocks": low > 0.02,
        f"{away:.0%} of the MXFP4 codes have no counterpart of the other sign: they may be INT4's": away > 0.1,
    }
    return [note for note, holds in notes.items() if holds]


def check_excludes(
    checkpoint: Checkpoint, quantization: QuantizationConfig, weights: WeightFormat, where: str
) -> list[Problem]:
    """Check the exclude list: routed experts must be quantized, other linear layers excluded and not quantized.

    MLPs may be MXFP4 too, as in amd/Kimi-K2.5-MXFP4; the engine loads them as BF16, which holds MXFP4 exactly.
    """
    findings = Findings("excludes")
    excludes = ExcludeRules(quantization.exclude or [])
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


# SGLang replaces the published names by its own while it loads.
_RENAMED = {
    "wqkv.": "attn.qkv_proj.",
    "wo.": "attn.proj.",
    "mm_projector.proj.0": "mm_projector.linear_1",
    "mm_projector.proj.2": "mm_projector.linear_2",
}
_ONCE = (
    "vision_tower.patch_embed.proj",
    "vision_tower.encoder.final_layernorm",
    "mm_projector.pre_norm",
    "mm_projector.linear_1",
    "mm_projector.linear_2",
)
_IN_A_LAYER = ("norm0", "norm1", "attn.qkv_proj", "attn.proj", "mlp.fc0", "mlp.fc1")


def check_tower(checkpoint: Checkpoint, layers: int) -> list[Problem]:
    """Check that every weight and bias of SGLang's Kimi-K2.5 tower with `layers` layers is present."""
    findings = Findings("vision tower")
    found = {_sglang_name(name) for name in (*checkpoint.tensors, *checkpoint.unread)}
    repeated = [f"vision_tower.encoder.blocks.{i}.{module}" for i in range(layers) for module in _IN_A_LAYER]
    wanted = [f"{module}.{kind}" for module in (*_ONCE, *repeated) for kind in ("weight", "bias")]
    for name in [*wanted, "vision_tower.patch_embed.pos_emb.weight"]:
        if name not in found:
            findings.add(
                "weight of the vision tower is missing",
                checkpoint.directory,
                f"a tower of {layers} layers, as vision_config says",
                "fetch the checkpoint again; for text alone `language_model_only: true` in config.json",
                name,
            )
    return findings.problems()


def _sglang_name(name: str) -> str:
    for published, own in _RENAMED.items():
        name = name.replace(published, own)
    return name


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
    findings = Findings("values")
    for tensor, count in find_non_finite(small):
        findings.add(
            f"NaN or Inf in {count:,} of {math.prod(tensor.shape):,} values",
            tensor.file,
            "finite values",
            "check the files with `kimi-w4a8 fetch --verify`; if they are right, do not use this checkpoint",
            tensor.name,
        )
    return findings.problems(), len(small)


def find_non_finite(tensors: Iterable[TensorInfo]) -> list[tuple[TensorInfo, int]]:
    """Return the tensors that contain NaN or Inf, with the number of such values.

    Files are read in parallel, each in the order of its data.
    """
    groups: dict[str, list[TensorInfo]] = {}
    for tensor in sorted(tensors, key=lambda tensor: tensor.start):
        groups.setdefault(str(tensor.file), []).append(tensor)
    with ThreadPoolExecutor(_READERS) as pool:
        return [found for group in pool.map(_non_finite_in_file, groups.values()) for found in group]


def _non_finite_in_file(tensors: list[TensorInfo]) -> list[tuple[TensorInfo, int]]:
    found = []
    with tensors[0].file.open("rb") as file:
        for tensor in tensors:
            integer, ones = _NON_FINITE[_dtype(tensor)]
            values = np.frombuffer(os.pread(file.fileno(), tensor.nbytes, tensor.start), integer)
            if count := int(np.count_nonzero((values & ones) == ones)):
                found.append((tensor, count))
    return found


def _dtype(tensor: TensorInfo) -> str:
    """Return the dtype of a tensor; Quark stores E8M0 scales as plain bytes."""
    return "F8_E8M0" if tensor.dtype == "U8" and tensor.name.endswith(".weight_scale") else tensor.dtype

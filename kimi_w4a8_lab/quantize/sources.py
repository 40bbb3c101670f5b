"""Checks before quantization writes anything: the source must be complete and in a format that Quark reads."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.version import Version

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.files import read_json
from kimi_w4a8_eagle3.base.installed import not_installed
from kimi_w4a8_eagle3.base.next_step import pip_install
from kimi_w4a8_eagle3.quark.config import MHA_DRAFT, MLA_DRAFT, is_packed_int4, quantization_of
from kimi_w4a8_eagle3.quark.safetensors_header import Checkpoint, TensorInfo, read_checkpoint

QUARK_MINIMUM = "0.13"
INSTALL_QUARK = pip_install(f"amd-quark=={QUARK_MINIMUM}")
# Layers that a text-only checkpoint of the same model does not have.
VISION = ("*mm_projector*", "*vision_tower*")
# Parts of one weight in compressed-tensors' pack-quantized format.
PACKED_PARTS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")


def require_quark() -> str:
    """Return the installed version of AMD Quark; raise KimiError when it is missing or too old."""
    try:
        version = metadata.version("amd-quark")
    except metadata.PackageNotFoundError:
        raise not_installed(["quark"]) from None
    if Version(version) < Version(QUARK_MINIMUM):
        raise KimiError(f"AMD Quark {version} is too old", expected=f"{QUARK_MINIMUM} or later", remedy=INSTALL_QUARK)
    return version


def read_source(directory: Path) -> tuple[dict[str, Any], Checkpoint]:
    """Return config.json and the tensors of a checkpoint; raise KimiError for the first problem of its files."""
    config = read_json(directory / "config.json")
    checkpoint = read_checkpoint(directory)
    if checkpoint.problems:
        raise checkpoint.problems[0]
    return config, checkpoint


def require_target(
    config: dict[str, Any], checkpoint: Checkpoint, exclude: Sequence[str], optional: Sequence[str]
) -> None:
    """Raise KimiError unless this is a target that can be quantized.

    It must be BF16 or compressed-tensors INT4, with each weight in one shard. Every pattern of `exclude` must match a
    layer; patterns in `optional` may match none.
    """
    quantization = quantization_of(config)
    if quantization is not None and not is_packed_int4(quantization):
        raise _already(quantization, checkpoint, "16-bit weights, or compressed-tensors INT4 (pack-quantized)")
    modules = linear_modules(checkpoint)
    unmatched = [p for p in exclude if p not in optional and not fnmatch.filter(modules, p)]
    if unmatched:
        raise KimiError(
            f"no layer of this checkpoint matches the exclude patterns {', '.join(unmatched)}",
            str(checkpoint.directory),
            "a Kimi-K2 target, with attention, router, dense and shared-expert layers",
            "check the source, or give patterns that match its layers with --exclude",
        )
    if all(any(fnmatch.fnmatch(module, p) for p in exclude) for module in modules):
        raise KimiError("every layer is excluded: nothing would be quantized", str(checkpoint.directory))
    _require_whole_modules(checkpoint)


def require_draft(config: dict[str, Any], checkpoint: Checkpoint) -> None:
    """Raise KimiError unless this is an EAGLE3 draft with 16-bit weights and `fc`."""
    quantization = quantization_of(config)
    if quantization is not None:
        raise _already(quantization, checkpoint, "16-bit weights")
    if "fc" not in linear_modules(checkpoint):
        raise KimiError(
            "the draft has no fc.weight, so it is not an EAGLE3 draft",
            str(checkpoint.directory),
            "fc.weight, which merges hidden states of the target",
            "give the folder of an EAGLE3 draft",
        )
    if MLA_DRAFT in config.get("architectures", ()):
        raise KimiError(
            "SGLang's class for MLA drafts reads kv_b_proj in 16 bits only, so it cannot serve a quantized one",
            str(checkpoint.directory / "config.json"),
            f"architectures with {MHA_DRAFT}",
            "serve it in BF16, or quantize an MHA draft",
        )


def linear_modules(checkpoint: Checkpoint) -> list[str]:
    """Return the modules that Quark takes for linear layers: a matrix called weight, not a norm or an embedding."""
    names = []
    for tensor in checkpoint.tensors.values():
        module, _, leaf = tensor.name.rpartition(".")
        matrix = leaf == "weight_packed" or (leaf == "weight" and len(tensor.shape) > 1)
        if matrix and module and not module.endswith("norm") and "embed" not in module:
            names.append(module)
    return names


def _require_whole_modules(checkpoint: Checkpoint) -> None:
    """Raise KimiError if parts of a packed weight lie in two shards, because Quark reads shard by shard."""
    packed: dict[str, TensorInfo] = {}
    for tensor in checkpoint.tensors.values():
        module, _, leaf = tensor.name.rpartition(".")
        if leaf in PACKED_PARTS and (first := packed.setdefault(module, tensor)).file != tensor.file:
            raise KimiError(
                f"the parts of {module} lie in two shards, {first.file.name} and {tensor.file.name}",
                str(checkpoint.directory),
                "each packed weight with its scale in one shard, because shards are quantized one by one",
                "save the checkpoint again with whole layers in a shard",
            )


def _already(quantization: dict[str, Any], checkpoint: Checkpoint, expected: str) -> KimiError:
    method = quantization.get("quant_method", "an unknown method")
    form = f" ({quantization['format']})" if "format" in quantization else ""
    return KimiError(
        f"the checkpoint is already quantized: {method}{form}",
        str(checkpoint.directory / "config.json"),
        expected,
        "quantize from the unquantized checkpoint",
    )

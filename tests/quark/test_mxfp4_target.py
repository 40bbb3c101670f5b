"""An MXFP4 target that AMD Quark writes: its values, and what the check refuses in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kimi_checkpoint import HIDDEN, INTER, edit_json, edit_tensor, read_shards
from support.quantizing import import_quark

from kimi_w4a8_eagle3.quark.packing import dequantized
from kimi_w4a8_eagle3.quark.preflight import preflight
from kimi_w4a8_eagle3.quark.weight_format import MXFP4
from kimi_w4a8_lab.quantize.quantize import KIMI_EXCLUDE, quantize_w4a8

LAYER = "language_model.model.layers.2"
GATE = f"{LAYER}.mlp.experts.1.gate_proj.weight"
Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def quark_mxfp4(bf16_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by AMD Quark; as in amd/Kimi-K2.5-MXFP4, the shared experts are MXFP4, too."""
    import_quark()
    directory = tmp_path_factory.mktemp("mxfp4") / "target"
    quantize_w4a8(bf16_target, directory, weights=MXFP4, exclude=[p for p in KIMI_EXCLUDE if "shared" not in p])
    return directory


@pytest.fixture
def target(quark_mxfp4: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(quark_mxfp4, tmp_path / "target"))


def test_its_values_are_those_that_quark_reads(quark_mxfp4: Path, bf16_target: Path) -> None:
    from quark.torch.utils.pack import Pack_fp4

    stored, source = read_shards(quark_mxfp4), read_shards(bf16_target)
    (tensors,) = (shard for shard in stored.values() if GATE in shard)
    codes, exponents = tensors[GATE], tensors[f"{GATE}_scale"]
    values = Pack_fp4(None, "fp4").unpack(codes, False).view(INTER, -1, 32) * torch.exp2(exponents - 127.0)[..., None]
    assert torch.equal(dequantized(codes, exponents).float(), values.flatten(1))
    (original,) = (shard[GATE] for shard in source.values() if GATE in shard)
    # Half of the widest step, 4 to 6, of a block whose largest value is less than 8 of its units.
    assert ((values.flatten(1) - original).abs().amax() <= torch.exp2(exponents - 127.0).amax() * 2).all()


def test_it_passes(target: Path) -> None:
    report = preflight(target)
    assert report.ok and report.weight_format == "Quark MXFP4" and report.notes == []
    (problem,) = preflight(target, tp=2).problems
    assert problem.found == "TP 2 cuts a block of down_proj: 32 / 2 = 16 columns a rank"


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Change:
    return lambda target: edit_tensor(target, name, change)


def weight(**fields: Any) -> Change:
    def edit(config: dict[str, Any]) -> None:
        config["quantization_config"]["global_quant_config"]["weight"].update(fields)

    return lambda target: edit_json(target / "config.json", edit)


def quantization(**fields: Any) -> Change:
    return lambda target: edit_json(target / "config.json", lambda c: c["quantization_config"].update(fields))


def nan(scale: torch.Tensor) -> torch.Tensor:
    scale[-1, 0] = 255
    return scale


BLOCKS_OF_16 = torch.zeros(INTER, HIDDEN // 16, dtype=torch.uint8)
INT4_WORDS = torch.zeros(INTER, HIDDEN // 8, dtype=torch.int32)
FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_channel"}
ATTENTION = {f"{LAYER}.self_attn.o_proj.weight": torch.zeros(HIDDEN, HIDDEN // 2, dtype=torch.uint8)}


@pytest.mark.parametrize(
    ("change", "found", "named"),
    [
        (tensor(f"{GATE}_scale", nan), "NaN or Inf in 1 of 64 values", [f"{GATE}_scale"]),
        (tensor(f"{GATE}_scale", lambda _: None), "weight_scale is missing", [f"{GATE}_scale"]),
        (tensor(f"{GATE}_scale", lambda _: BLOCKS_OF_16), "weight_scale is U8 [32, 4]", [f"{GATE}_scale"]),
        (tensor(f"{GATE}_scale", lambda s: s[:-1].clone()), "weight_scale is U8 [31, 2]", [f"{GATE}_scale"]),
        (tensor(GATE, lambda _: INT4_WORDS), "weight is I32 [32, 8]", [GATE]),
        (tensor(*ATTENTION, lambda _: ATTENTION.popitem()[1]), "excluded layer is quantized (U8)", list(ATTENTION)),
        (weight(group_size=16), "experts are stored as fp4 per_group, group size 16, scales e8m0", []),
        (weight(dtype="fp6_e2m3"), "experts are stored as fp6_e2m3 per_group, group size 32, scales e8m0", []),
        (weight(scale_format="float32"), "experts are stored as fp4 per_group, group size 32, scales float32", []),
        (
            quantization(quant_method="compressed-tensors", format="mxfp4-pack-quantized", global_quant_config=None),
            "experts are stored by compressed-tensors as mxfp4-pack-quantized",
            [],
        ),
        (
            quantization(layer_quant_config={"*experts*": {"weight": FP8}}),
            "layer_quant_config gives *experts* another format: fp8_e4m3 per_channel",
            [],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused(target: Path, change: Change, found: str, named: list[str]) -> None:
    change(target)
    (problem,) = preflight(target).problems
    assert problem.found.startswith(found) and problem.tensors == tuple(named)
    assert problem.expected and problem.remedy

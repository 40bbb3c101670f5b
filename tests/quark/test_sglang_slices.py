"""SGLang's own expert loader gives every rank the slices that `packing` defines, for its CPU and its GPU code path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.kimi_checkpoint import EXPERTS, HIDDEN, INTER, read_shards
from support.packing import slice_packed_columns, slice_rows

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.quark.packing import fold_scales
from kimi_w4a8_eagle3.quark.weight_format import INT4, MXFP4, WeightFormat
from kimi_w4a8_eagle3.sglang_plugin.model import load_check

LAYER = "language_model.model.layers.1.mlp.experts"
SHARD_IDS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@pytest.fixture(scope="module")
def fused_moe() -> type[torch.nn.Module]:
    from kimi_w4a8_laptop import cpu

    cpu.install()
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    return FusedMoE


def rank_layer(
    fused_moe: type[torch.nn.Module],
    rank: int,
    tp: int,
    padded_loading: bool,
    weights: WeightFormat = INT4,
    inter: int = INTER,
) -> Any:
    """A FusedMoE of one rank with our scheme's parameters: what its loader reads, without a process group."""
    from kimi_w4a8_eagle3.sglang_plugin.model.w4a8_moe import QuarkW4A8MoE

    layer: Any = fused_moe.__new__(fused_moe)
    torch.nn.Module.__init__(layer)
    scheme = QuarkW4A8MoE.__new__(QuarkW4A8MoE)
    scheme.layer_name, scheme.weights = "test", weights
    layer.__dict__.update(
        moe_tp_rank=rank,
        moe_tp_size=tp,
        quant_config=SimpleNamespace(get_name=lambda: "quark"),
        quant_method=SimpleNamespace(),
        scheme=scheme,
        moe_runner_config=SimpleNamespace(is_gated=True),
        use_triton_kernels=False,
        use_flashinfer_trtllm_moe=False,
        use_presharded_weights=False,
        use_padded_loading=padded_loading,  # the CPU's path; a GPU narrows instead
        _has_fused_shared=False,
    )
    scheme.create_weights(layer, EXPERTS, HIDDEN, inter // tp, torch.bfloat16)
    return layer


@pytest.mark.parametrize("padded_loading", [True, False], ids=["cpu", "gpu"])
@pytest.mark.parametrize("scale_shape", [(), (1,)], ids=["scalar", "[1]"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_rank_loads_its_slice(
    fused_moe: type[torch.nn.Module], quark_target: Path, tp: int, scale_shape: tuple[int, ...], padded_loading: bool
) -> None:
    tensors = {name: t for shard in read_shards(quark_target).values() for name, t in shard.items()}

    def stacked(projection: str, suffix: str) -> torch.Tensor:
        return torch.stack([tensors[f"{LAYER}.{e}.{projection}.weight{suffix}"] for e in range(EXPERTS)])

    for rank in range(tp):
        layer = rank_layer(fused_moe, rank, tp, padded_loading)
        load(layer, tensors, scale_shape)
        gate_up = torch.cat([slice_rows(stacked(p, ""), rank, tp) for p in ("gate_proj", "up_proj")], dim=1)
        assert torch.equal(layer.w13_weight, gate_up)
        assert torch.equal(layer.w2_weight, slice_packed_columns(stacked("down_proj", ""), rank, tp))
        scales = [
            slice_rows(fold_scales(stacked(p, "_scale"), stacked(p, "_scale_2")), rank, tp, dim=-1)
            for p in ("gate_proj", "up_proj")
        ]
        weights = scheme_weights(layer)
        assert torch.equal(weights.s13, torch.cat(scales, dim=1))
        assert torch.equal(weights.s2, fold_scales(stacked("down_proj", "_scale"), stacked("down_proj", "_scale_2")))


def load(
    layer: Any,
    tensors: dict[str, torch.Tensor],
    scale_shape: tuple[int, ...] = (),
    suffixes: tuple[str, ...] = ("", "_scale", "_scale_2"),
) -> None:
    """Hand every tensor of the layer to SGLang's loader."""
    for projection, shard_id in SHARD_IDS.items():
        for suffix in suffixes:
            name = f"{'w2' if shard_id == 'w2' else 'w13'}_weight{suffix}"
            for expert in range(EXPERTS):
                tensor = tensors[f"{LAYER}.{expert}.{projection}.weight{suffix}"]
                tensor = tensor.reshape(scale_shape) if suffix == "_scale" and len(suffixes) == 3 else tensor
                layer._weight_loader_impl(getattr(layer, name), tensor, f"experts.{name}", shard_id, expert)


def scale_off_by_a_percent(layer: Any) -> None:
    layer.w2_weight_scale_2[3] *= 1.01


def experts_exchanged(layer: Any) -> None:
    for parameter in layer.parameters():
        parameter.data = parameter.data.roll(1, 0)


def gate_and_up_exchanged(layer: Any) -> None:
    for name in ("w13_weight", "w13_weight_scale_2"):
        getattr(layer, name).data = getattr(layer, name).data.roll(INTER // layer.moe_tp_size, 1)


def first_stage_scale_of_up_for_gate(layer: Any) -> None:
    layer.w13_weight_scale.data = layer.w13_weight_scale.data.flip(1)


def a_nibble_flipped(layer: Any) -> None:
    layer.w2_weight[2, 5, 0] ^= 1


def packed_words_exchanged(layer: Any) -> None:
    layer.w13_weight.data[[0, 3]] = layer.w13_weight.data[[3, 0]]  # the scales stay in place


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (None, ""),
        (scale_off_by_a_percent, "w2_weight_scale_2 of expert 3 did not load as it is stored"),
        (experts_exchanged, "w13_weight_scale of expert 0 did not load as it is stored"),
        (gate_and_up_exchanged, "w13_weight_scale_2 of expert 0 did not load as it is stored"),
        (first_stage_scale_of_up_for_gate, "w13_weight_scale of expert 0 did not load as it is stored"),
        (a_nibble_flipped, "w2_weight of expert 2 did not load as it is stored"),
        (packed_words_exchanged, "w13_weight of expert 0 did not load as it is stored"),
    ],
)
def test_the_load_check_finds_weights_that_the_files_lack(
    fused_moe: type[torch.nn.Module], quark_target: Path, tp: int, fault: Callable[[Any], None] | None, found: str
) -> None:
    tensors = {name: t for shard in read_shards(quark_target).values() for name, t in shard.items()}
    load_check.note_folder((str(quark_target), [], True))
    try:
        for rank in range(tp):
            layer = rank_layer(fused_moe, rank, tp, padded_loading=True)
            load(layer, tensors)
            if fault is None:
                load_check.require_as_stored("model.layers.1.mlp.experts", layer)
                continue
            fault(layer)
            with pytest.raises(KimiError) as caught:
                load_check.require_as_stored("model.layers.1.mlp.experts", layer)
            assert caught.value.what == found and f"(rank {rank})" in str(caught.value.where)
    finally:
        load_check.note_folder(("", [], False))
    load_check.require_as_stored("model.layers.1.mlp.experts", layer)  # weights from no file: nothing to compare


# A parameter, how one of two ranks cuts it, and the tensors that it is made of.
M, A, V, D = "language_model.model.", f"{LAYER[:-13]}.self_attn.", "vision_tower.blocks.0.", "midlayer.self_attn."
HELD = {
    f"{A}fused_qkv_a_proj_with_mqa.weight": ("whole", f"{A}q_a_proj.weight {A}kv_a_proj_with_mqa.weight"),
    f"{M}layers.0.mlp.gate_up_proj.weight": (
        "rows",
        f"{M}layers.0.mlp.gate_proj.weight {M}layers.0.mlp.up_proj.weight",
    ),
    f"{M}layers.1.mlp.gate.e_score_correction_bias": ("whole", f"{M}layers.1.mlp.gate.e_score_correction_bias"),
    f"{V}attn.qkv_proj.weight": ("thirds", f"{V}wqkv.weight"),
    f"{V}attn.proj.weight": ("columns", f"{V}wo.weight"),
    "vision_tower.patch_embed.proj.weight": ("whole", "vision_tower.patch_embed.proj.weight"),
    "model.layers.0.self_attn.qkv_proj.weight": ("rows", f"{D}q_proj.weight {D}k_proj.weight {D}v_proj.weight"),
    "model.fc.weight": ("whole", "fc.weight"),
}


@pytest.mark.parametrize("rank", [0, 1, 3])  # 3: the last of TP 4 with DP attention 2, whose groups have two ranks
def test_a_rank_compares_every_parameter_outside_the_experts(
    fused_moe: type[torch.nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    from sglang.srt import distributed

    monkeypatch.setattr(distributed, "get_tp_group", lambda: SimpleNamespace(rank_in_group=rank))
    stored, loaded = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, (cut, tensors) in HELD.items():
        names = tensors.split()
        shape = (6,) if "bias" in name else (6, 4, 2, 2) if "patch" in name else (6, 4)
        stored |= {one: torch.randn(shape, dtype=torch.bfloat16) for one in names}
        whole = [part for one in names for part in stored[one].chunk(3 if cut == "thirds" else 1)]
        whole = [one if cut == "whole" else one.chunk(2, int(cut == "columns"))[rank % 2] for one in whole]
        loaded[name] = torch.cat([part[:1] for part in whole] if cut == "thirds" else whole).float()
    save_file(stored, tmp_path / "model.safetensors")
    monkeypatch.setattr(load_check, "_folder", [tmp_path])
    model: Any = SimpleNamespace(named_parameters=lambda: [(n, torch.nn.Parameter(one)) for n, one in loaded.items()])
    load_check.require_all_as_stored(model)
    for name, parameter in loaded.items():
        loaded[name] = parameter.roll(1, 0)
        with pytest.raises(KimiError, match="did not load as it is stored") as caught:
            load_check.require_all_as_stored(model)
        assert (
            caught.value.what.startswith(name)
            and str(caught.value.where) == f"{HELD[name][1].split()[0]} (rank {rank})"
        )
        loaded[name] = parameter


def test_padding_is_no_difference_a_nan_is_one_value_and_shared_rows_are_not_compared(tmp_path: Path) -> None:
    rows = torch.arange(20.0).reshape(10, 2).index_put((torch.tensor(7), torch.tensor(0)), torch.tensor(torch.nan))
    save_file({"embed": rows, "q": torch.ones(128, 2), "k": torch.ones(8, 2)}, file := tmp_path / "model.safetensors")
    embed, q, k = (load_check._Block.parts(file, name) for name in ("embed", "q", "k"))
    padded = torch.cat([rows[6:], torch.zeros(2, 2)])  # of rank 1: a vocabulary is padded to whole ranks
    assert load_check._compare("embed", padded, embed, 1)
    with pytest.raises(KimiError, match="did not load as it is stored"):
        load_check._compare("embed", padded.nan_to_num(), embed, 1)
    assert not load_check._compare("qkv", torch.zeros(20, 2), q + k + k, 1)  # 8 ranks, 4 keys: each is on two ranks


@pytest.mark.parametrize("padded_loading", [True, False], ids=["cpu", "gpu"])
def test_every_rank_loads_its_blocks_of_mxfp4(
    fused_moe: type[torch.nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, padded_loading: bool
) -> None:
    tp, inter, tensors = 2, 64, {}
    for expert in range(EXPERTS):
        for part, rows, k in (("gate_proj", inter, HIDDEN), ("up_proj", inter, HIDDEN), ("down_proj", HIDDEN, inter)):
            name = f"{LAYER}.{expert}.{part}.weight"
            tensors[name] = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8)
            tensors[f"{name}_scale"] = torch.randint(110, 130, (rows, k // 32), dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    monkeypatch.setattr(load_check, "_folder", [tmp_path])
    for rank in range(tp):
        layer = rank_layer(fused_moe, rank, tp, padded_loading, MXFP4, inter)
        load(layer, tensors, suffixes=("", "_scale"))
        load_check.require_as_stored("model.layers.1.mlp.experts", layer, MXFP4)
        layer.w2_weight_scale[2, 5, 0] += 1
        with pytest.raises(KimiError, match="w2_weight_scale of expert 2 did not load as it is stored"):
            load_check.require_as_stored("model.layers.1.mlp.experts", layer, MXFP4)


def scheme_weights(layer: Any) -> Any:
    """Return the weights that the scheme hands to a backend's `prepare`."""
    layer.scheme.top_k = 2
    return layer.scheme._loaded(layer)

"""A checkpoint that the real AMD Quark writes once a session, copies of it to break, and a draft that fits it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.kimi_checkpoint import DRAFT, HIDDEN, MLA, MLA_DRAFT, write_bf16
from support.quantizing import import_quark

from kimi_w4a8_laptop import torchvision_ops


@pytest.fixture(scope="session", autouse=True)
def quark_imports() -> None:
    """Quark imports transformers, which imports torchvision."""
    torchvision_ops.declare_missing()


@pytest.fixture(scope="session")
def bf16_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bf16") / "target"
    write_bf16(directory)
    return directory


@pytest.fixture(scope="session")
def quark_target(bf16_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by AMD Quark during this test run; tests that change it take a copy."""
    import_quark()
    from kimi_w4a8_lab.quantize.quantize import quantize_w4a8

    directory = tmp_path_factory.mktemp("w4a8") / "target"
    quantize_w4a8(bf16_target, directory)
    return directory


@pytest.fixture
def target(quark_target: Path, tmp_path: Path) -> Path:
    """A copy of the quantized checkpoint that a test may break."""
    return Path(shutil.copytree(quark_target, tmp_path / "target"))


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """An EAGLE3 draft (random weights) that fits the target."""
    return _write_draft(tmp_path / "draft", DRAFT, {})


@pytest.fixture
def mla_draft(tmp_path: Path) -> Path:
    """The same with latent attention, as SGLang's own class names and shapes its weights."""
    c, heads, inter = MLA, DRAFT["num_attention_heads"], DRAFT["intermediate_size"]
    qk = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    shapes = {
        "input_layernorm": (HIDDEN,),
        "hidden_norm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_a_proj": (c["q_lora_rank"], 2 * HIDDEN),
        "self_attn.q_a_layernorm": (c["q_lora_rank"],),
        "self_attn.q_b_proj": (heads * qk, c["q_lora_rank"]),
        "self_attn.kv_a_proj_with_mqa": (c["kv_lora_rank"] + c["qk_rope_head_dim"], 2 * HIDDEN),
        "self_attn.kv_a_layernorm": (c["kv_lora_rank"],),
        "self_attn.kv_b_proj": (heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), c["kv_lora_rank"]),
        "self_attn.o_proj": (HIDDEN, heads * c["v_head_dim"]),
        "mlp.gate_proj": (inter, HIDDEN),
        "mlp.up_proj": (inter, HIDDEN),
        "mlp.down_proj": (HIDDEN, inter),
    }
    return _write_draft(
        tmp_path / "draft",
        MLA_DRAFT,
        {f"midlayer.{name}.weight": torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()},
    )


def _write_draft(directory: Path, config: dict[str, Any], layer: dict[str, torch.Tensor]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    size = DRAFT["draft_vocab_size"]
    tensors = {
        **layer,
        "fc.weight": torch.zeros(HIDDEN, 3 * HIDDEN, dtype=torch.bfloat16),
        "norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
        "lm_head.weight": torch.zeros(size, HIDDEN, dtype=torch.bfloat16),
        "d2t": torch.arange(size),  # draft token i is target token 2 * i
    }
    save_file(tensors, directory / "model.safetensors")
    return directory

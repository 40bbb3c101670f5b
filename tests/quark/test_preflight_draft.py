"""A draft that does not fit its target would not load, or load and accept nothing: it is refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.kimi_checkpoint import CAPTURED, DRAFT, HIDDEN, LAYERS, TEXT, VOCAB, edit_json

from kimi_w4a8_eagle3.quark.config import DraftShape, TextShape
from kimi_w4a8_eagle3.quark.draft_checks import captured_layers
from kimi_w4a8_eagle3.quark.preflight import preflight


def messages(target: Path, draft: Path, tp: int = 1) -> list[str]:
    return [problem.what for problem in preflight(target, draft, tp).problems]


def change_weights(draft: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(draft / "model.safetensors")
    change(tensors)
    save_file(tensors, draft / "model.safetensors")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("architectures", ["LlamaForCausalLM"], "draft architecture is LlamaForCausalLM"),
        ("architectures", [], "draft architecture is none"),
        ("target_hidden_size", 128, "draft target_hidden_size is 128"),
        ("vocab_size", VOCAB + 1, f"draft vocab_size is {VOCAB + 1}"),
        ("num_attention_heads", "four", "config.json is not usable: num_attention_heads: "),
    ],
)
def test_config_that_does_not_fit(quark_target: Path, draft: Path, field: str, value: object, message: str) -> None:
    edit_json(draft / "config.json", lambda c: c.update({field: value}))
    (found,) = messages(quark_target, draft)
    assert found.startswith(message)


def test_other_hidden_size(quark_target: Path, draft: Path) -> None:
    edit_json(draft / "config.json", lambda c: c.update(hidden_size=HIDDEN * 2))
    found = messages(quark_target, draft)
    assert f"draft hidden_size is {HIDDEN * 2}" in found
    assert f"draft fc.weight has shape [{HIDDEN}, {3 * HIDDEN}]" in found


def test_narrower_draft_that_names_its_target(quark_target: Path, draft: Path) -> None:
    half = HIDDEN // 2
    edit_json(draft / "config.json", lambda c: c.update(hidden_size=half, target_hidden_size=HIDDEN))
    sizes = {"fc.weight": (half, 3 * HIDDEN), "norm.weight": (half,), "lm_head.weight": (40, half)}
    change_weights(draft, lambda t: t.update({name: torch.zeros(size) for name, size in sizes.items()}))
    assert messages(quark_target, draft) == []


@pytest.mark.parametrize(
    "layers",
    [[2, 3, LAYERS], [4, 3, 2], [2, 2, 4], [-1, 2, 3], [1, 3, LAYERS - 1], []],
    ids=["beyond the last", "descending", "repeated", "negative", "shifted beyond the last", "none"],
)
def test_captured_layers_that_do_not_fit(quark_target: Path, draft: Path, layers: list[int]) -> None:
    edit_json(draft / "config.json", lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=layers))
    assert any("eagle_aux_hidden_state_layer_ids" in message for message in messages(quark_target, draft))


def test_number_of_captured_layers_must_fit_fc(quark_target: Path, draft: Path) -> None:
    edit_json(draft / "config.json", lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[2, 4]))
    assert messages(quark_target, draft) == [f"draft fc.weight has shape [{HIDDEN}, {3 * HIDDEN}]"]


@pytest.mark.parametrize(
    ("ids", "captured"), [(CAPTURED, CAPTURED), ([1, 2, 3], [2, 3, 4]), (None, [2, LAYERS // 2, LAYERS - 3])]
)
def test_captured_layers_are_those_of_sglang(ids: list[int] | None, captured: list[int]) -> None:
    config: dict[str, Any] = {**DRAFT, "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    assert captured_layers(DraftShape(**config), TextShape.model_validate(TEXT)) == captured


def test_no_vocabulary_map(quark_target: Path, draft: Path) -> None:
    change_weights(draft, lambda tensors: tensors.pop("d2t"))
    assert messages(quark_target, draft) == ["draft has no vocabulary map d2t"]


def test_full_vocabulary_needs_no_map(quark_target: Path, draft: Path) -> None:
    def widen(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["d2t"]
        tensors["lm_head.weight"] = torch.zeros(VOCAB, HIDDEN)

    change_weights(draft, widen)
    edit_json(draft / "config.json", lambda c: c.update(draft_vocab_size=VOCAB))
    assert messages(quark_target, draft) == []


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        (torch.arange(40) + VOCAB, "(40 of 40 tokens outside, 0 repeated)"),
        (torch.arange(40) - 1, "(1 of 40 tokens outside, 0 repeated)"),
        (-torch.arange(40), "(0 of 40 tokens outside, 39 repeated)"),
        (torch.arange(39), "vocabulary map d2t is I64 [39]"),
        (torch.zeros(40), "vocabulary map d2t is F32 [40]"),
    ],
)
def test_vocabulary_map_that_leaves_the_target(
    quark_target: Path, draft: Path, d2t: torch.Tensor, message: str
) -> None:
    change_weights(draft, lambda tensors: tensors.update(d2t=d2t))
    (found,) = messages(quark_target, draft)
    assert message in found


@pytest.mark.parametrize("name", ["fc.weight", "norm.weight", "lm_head.weight"])
def test_draft_without_a_tensor(quark_target: Path, draft: Path, name: str) -> None:
    change_weights(draft, lambda tensors: tensors.pop(name))
    assert messages(quark_target, draft) == [f"draft has no {name}"]


def test_draft_heads_and_tensor_parallel_size(quark_target: Path, draft: Path) -> None:
    edit_json(draft / "config.json", lambda c: c.update(num_attention_heads=6, num_key_value_heads=3))
    assert messages(quark_target, draft, tp=2) == ["TP 2 does not divide the draft's 6 attention or 3 KV heads"]


def test_truncated_draft_is_the_only_problem(quark_target: Path, draft: Path) -> None:
    path = draft / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    (found,) = messages(quark_target, draft)
    assert found.startswith("model.safetensors is truncated")


def test_no_such_draft(quark_target: Path, tmp_path: Path) -> None:
    assert messages(quark_target, tmp_path / "absent") == ["no such draft directory"]
    (tmp_path / "empty").mkdir()
    found = messages(quark_target, tmp_path / "empty")
    assert found == ["model.safetensors.index.json is missing, and so are the weights", "config.json is missing"]


def test_null_fields_mean_absent(quark_target: Path, draft: Path) -> None:
    edit_json(draft / "config.json", lambda c: c.update(target_hidden_size=None, head_dim=None))
    assert json.loads((draft / "config.json").read_text())["head_dim"] is None
    assert messages(quark_target, draft) == []

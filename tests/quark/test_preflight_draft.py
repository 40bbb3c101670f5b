"""A draft that does not fit its target would not load, or load and accept nothing: it is refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kimi_checkpoint import CAPTURED, DRAFT, HIDDEN, LAYERS, TEXT, VOCAB, edit_json, rewrite

from kimi_w4a8_eagle3.quark.config import DraftShape, TextShape
from kimi_w4a8_eagle3.quark.preflight import captured_layers, preflight

KV_B = "midlayer.self_attn.kv_b_proj.weight"


def messages(target: Path, draft: Path, tp: int = 1) -> list[str]:
    return [problem.found for problem in preflight(target, draft, tp).problems]


def _rename(tensors: dict[str, torch.Tensor], old: str, new: str) -> None:
    for name in [name for name in tensors if name.startswith(old)]:
        tensors[name.replace(old, new)] = tensors.pop(name)


def sized(**sizes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {f"{name}.weight": torch.zeros(size) for name, size in sizes.items()}


HALF = HIDDEN // 2
HEAD = "draft has an lm_head, which SGLang replaces by the target's: its draft_vocab_size is null"
FC = f"draft fc.weight has shape [{HIDDEN}, {3 * HIDDEN}]"
CAPTURES_TWO = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4]}}
# Fields of config.json, tensors (None: left out), and the messages.
DRAFTS: list[tuple[dict[str, Any], dict[str, torch.Tensor | None], list[str]]] = [
    ({"architectures": ["LlamaForCausalLM"]}, {}, ["draft architecture is LlamaForCausalLM"]),
    ({"architectures": []}, {}, ["draft architecture is none"]),
    ({"target_hidden_size": 128}, {}, ["draft target_hidden_size is 128"]),
    ({"target_hidden_size": None, "head_dim": None}, {}, []),  # a null counts as absent
    ({"vocab_size": VOCAB + 1}, {}, [f"draft vocab_size is {VOCAB + 1}"]),
    ({"num_attention_heads": "four"}, {}, ["config.json is not usable: num_attention_heads: "]),
    (
        {"num_attention_heads": 6, "num_key_value_heads": 3},
        {},
        ["TP 4 does not divide the draft's 6 attention or 3 KV"],
    ),
    ({"hidden_size": HIDDEN * 2}, {}, [f"draft hidden_size is {HIDDEN * 2}", FC, "draft norm", "draft lm_head"]),
    (
        {"hidden_size": HALF, "target_hidden_size": HIDDEN},
        sized(fc=(HALF, 3 * HIDDEN), norm=(HALF,), lm_head=(40, HALF)),
        [],  # a narrower draft that names its target
    ),
    (CAPTURES_TWO, {}, [FC]),
    ({}, {"d2t": None}, ["draft has no vocabulary map d2t"]),
    ({"draft_vocab_size": VOCAB}, {"d2t": None, **sized(lm_head=(VOCAB, HIDDEN))}, []),
    ({"draft_vocab_size": None}, {"d2t": None}, [HEAD]),
    ({"draft_vocab_size": None}, {"d2t": None, "lm_head.weight": None}, []),  # it shares the target's
    *(({}, {f"{name}.weight": None}, [f"draft has no {name}.weight"]) for name in ("fc", "norm", "lm_head")),
]


@pytest.mark.parametrize(("config", "tensors", "expected"), DRAFTS)
def test_a_draft_fits_its_target_or_the_reason_is_told(
    quark_target: Path,
    draft: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor | None],
    expected: list[str],
) -> None:
    edit_json(draft / "config.json", lambda found: found.update(config))

    def change(found: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            found.pop(name) if tensor is None else found.update({name: tensor})

    rewrite(draft, change)
    found = messages(quark_target, draft, tp=4 if config.get("num_key_value_heads") == 3 else 1)
    assert [text[: len(start)] for text, start in zip(found, expected, strict=True)] == expected


@pytest.mark.parametrize(
    "layers",
    [[2, 3, LAYERS], [4, 3, 2], [2, 2, 4], [-1, 2, 3], [1, 3, LAYERS - 1], []],
    ids=["beyond the last", "descending", "repeated", "negative", "shifted beyond the last", "none"],
)
def test_captured_layers_that_do_not_fit(quark_target: Path, draft: Path, layers: list[int]) -> None:
    edit_json(draft / "config.json", lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=layers))
    assert any("eagle_aux_hidden_state_layer_ids" in message for message in messages(quark_target, draft))


@pytest.mark.parametrize(
    ("ids", "captured"), [(CAPTURED, CAPTURED), ([1, 2, 3], [2, 3, 4]), (None, [2, LAYERS // 2, LAYERS - 3])]
)
def test_captured_layers_are_those_of_sglang(ids: list[int] | None, captured: list[int]) -> None:
    config: dict[str, Any] = {**DRAFT, "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    assert captured_layers(DraftShape(**config), TextShape.model_validate(TEXT)) == captured


def test_a_reduced_vocabulary_is_a_note(quark_target: Path, draft: Path) -> None:
    report = preflight(quark_target, draft)
    (note,) = [note for note in report.notes if "proposes" in note]
    assert report.ok and f"40 of the target's {VOCAB} tokens" in note and "rejection-sampling" in note


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("draft_vocab_size"), "draft has no draft_vocab_size"),
        (lambda c: c.update(tie_word_embeddings=True), "draft proposes 40 tokens with tie_word_embeddings"),
        (lambda c: c.update(draft_vocab_size=VOCAB + 1), f"draft_vocab_size is {VOCAB + 1}"),
    ],
)
def test_a_vocabulary_that_cannot_be_served_is_seen_in_the_config_alone(
    quark_target: Path, draft: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    (draft / "model.safetensors").unlink()
    edit_json(draft / "config.json", change)
    found = [text for text in messages(quark_target, draft) if "vocab" in text or "tokens" in text]
    assert [text[: len(message)] for text in found] == [message]


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
    rewrite(draft, lambda tensors: tensors.update(d2t=d2t))
    (found,) = messages(quark_target, draft)
    assert message in found


def test_a_whole_mla_draft_has_no_problem(quark_target: Path, mla_draft: Path) -> None:
    assert messages(quark_target, mla_draft) == messages(quark_target, mla_draft, tp=4) == []  # latents are not split
    rewrite(mla_draft, lambda t: _rename(t, "midlayer.", "layers.0."))
    assert messages(quark_target, mla_draft) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("midlayer.self_attn.kv_b_proj.weight"), "draft has no midlayer.self_attn.kv_b_proj.weight"),
        (
            lambda t: _rename(t, "midlayer.", "model.midlayer."),
            "draft has weights that Eagle3DeepseekV2ForCausalLM does not load",
        ),
        (lambda t: t.update({"fc_norm.0.weight": torch.ones(HIDDEN)}), "(its config does not enable fc_norm)"),
        (
            lambda t: t.update({f"midlayer.self_attn.{n}_proj.weight": torch.zeros(8, HIDDEN) for n in "qkv"}),
            "draft has weights that Eagle3DeepseekV2ForCausalLM does not load",
        ),
        (lambda t: t.update({KV_B: t[KV_B].to(torch.float8_e4m3fn)}), "draft's kv_b_proj is F8_E4M3"),
    ],
    ids=["a weight less", "wrapped", "norms unasked", "an MHA layer", "FP8"],
)
def test_an_mla_draft_that_would_load_and_accept_nothing(
    quark_target: Path, mla_draft: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    rewrite(mla_draft, change)
    (found,) = messages(quark_target, mla_draft)
    assert message in found


@pytest.mark.parametrize("flag", ["fc_norm", "use_aux_norm"])
def test_an_mla_draft_that_asks_for_norms_has_them(quark_target: Path, mla_draft: Path, flag: str) -> None:
    edit_json(mla_draft / "config.json", lambda c: c.update({flag: True}))
    assert messages(quark_target, mla_draft) == [f"draft has no fc_norm.{number}.weight" for number in range(3)]
    rewrite(mla_draft, lambda t: t.update({f"fc_norm.{i}.weight": torch.ones(HIDDEN) for i in range(3)}))
    assert messages(quark_target, mla_draft) == []


def test_an_mla_draft_names_the_size_that_it_lacks(quark_target: Path, mla_draft: Path) -> None:
    edit_json(mla_draft / "config.json", lambda c: c.pop("kv_lora_rank"))
    assert messages(quark_target, mla_draft) == ["config.json is not usable: mla.kv_lora_rank: field required"]


def test_truncated_draft_is_the_only_problem(quark_target: Path, draft: Path) -> None:
    path = draft / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    (found,) = messages(quark_target, draft)
    assert found.startswith("model.safetensors is truncated")


def test_no_such_draft(quark_target: Path, tmp_path: Path) -> None:
    assert messages(quark_target, tmp_path / "absent") == ["no such draft directory"]
    assert preflight(quark_target, tmp_path / "absent").draft == str(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    found = messages(quark_target, tmp_path / "empty")
    assert found == ["model.safetensors.index.json is missing, and so are the weights", "config.json is missing"]

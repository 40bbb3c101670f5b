import json
import shutil
import sys

import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import save_file

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.quark.preflight import preflight
from kimi_w4a8_laptop import tiny, torchvision_ops
from kimi_w4a8_laptop.tiny.tokenizer import chat_text
from proof.tiny.checkpoint import PREFIX, load_target, load_tower, read_tensors, save_target
from proof.tiny.config import (
    DraftConfig,
    TargetConfig,
    TowerConfig,
    draft_config_json,
    preprocessor_config_json,
    target_config_json,
    text_config_json,
)
from proof.tiny.evaluate import MAX_WEIGHT_BYTES, TinyEvaluation, evaluate, weight_bytes
from proof.tiny.generate import greedy
from proof.tiny.model import yarn_frequencies
from proof.tiny.problems import problems
from proof.tiny.sight import sight
from proof.tiny.tokenizer import load_tokenizer
from proof.tiny.typed import examination

pytestmark = pytest.mark.slow

C, T = TargetConfig(), TowerConfig()


@pytest.mark.parametrize("folder", [tiny.target_path, tiny.target_bf16_path])
def test_the_index_names_every_tensor_and_all_are_finite(folder):
    tensors = read_tensors(folder())
    weight_map = json.loads((folder() / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(weight_map) == set(tensors)
    assert {f.name for f in folder().glob("*.safetensors")} == set(weight_map.values())
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int32:
            assert torch.isfinite(tensor).all(), name
        if name.endswith(("weight_scale", "weight_scale_2")):
            assert (tensor > 0).all(), name


def test_quantization_config_is_the_published_one():
    config = json.loads((tiny.target_path() / "config.json").read_text())
    quantization = config["quantization_config"]
    first, second = quantization["global_quant_config"]["weight"]
    assert (first["dtype"], first["qscheme"], first["is_dynamic"]) == ("fp8_e4m3", "per_tensor", False)
    assert (second["dtype"], second["qscheme"], second["ch_axis"]) == ("int4", "per_channel", 0)
    inputs = quantization["global_quant_config"]["input_tensors"]
    assert (inputs["dtype"], inputs["qscheme"], inputs["is_dynamic"]) == ("fp8_e4m3", "per_tensor", True)
    assert (quantization["quant_method"], quantization["export"]["pack_method"]) == ("quark", "reorder")
    assert not [name for name in quantization["exclude"] if ".experts." in name]
    excluded = {name.removesuffix(".weight") for name, tensor in read_tensors(tiny.target_path()).items()
                if tensor.dtype == torch.bfloat16 and tensor.dim() == 2 and "embed" not in name}  # fmt: skip
    assert set(quantization["exclude"]) == excluded


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_package_accepts_its_own_checkpoints(tp):
    report = preflight(tiny.target_path(), tiny.draft_path(), tp)
    assert report.ok, report.problems


def test_configs_on_disk_are_those_of_the_code():
    on_disk = json.loads((tiny.target_path() / "config.json").read_text())
    del on_disk["quantization_config"]
    folders = tiny.target_path(), tiny.target_bf16_path()
    assert on_disk == target_config_json(C, T) == json.loads((folders[1] / "config.json").read_text())
    for folder in folders:
        assert json.loads((folder / "preprocessor_config.json").read_text()) == preprocessor_config_json(T)
    draft = json.loads((tiny.draft_path() / "config.json").read_text())
    assert draft == draft_config_json(C, DraftConfig())
    assert draft["eagle_config"]["eagle_aux_hidden_state_layer_ids"][0] != 1  # SGLang would shift the list


def test_a_longer_context_keeps_the_frequencies_of_the_training():
    """With 8 times the original context, 8 times as many rotations divide slow dimensions from fast ones."""

    class Trained(TargetConfig):
        @property
        def rope_scaling(self):
            return {**super().rope_scaling, "beta_fast": 32.0, "beta_slow": 1.0}

    assert C.context == 65_536
    assert yarn_frequencies(C.latent).equal(yarn_frequencies(Trained(original_context=2048).latent))


def test_all_weights_together_stay_below_the_limit():
    folders = [tiny.target_path(), tiny.target_bf16_path(), tiny.draft_path()]
    assert weight_bytes(folders) <= MAX_WEIGHT_BYTES
    assert not [f for f in tiny.WEIGHTS.rglob("*") if f.is_file() and f.parent not in folders]


def test_export_and_load_are_inverse(tmp_path):
    model, tower = load_target(tiny.target_bf16_path()), load_tower(tiny.target_path())
    save_target(model, tower, load_tokenizer(tiny.target_path()), tmp_path / "again")
    for file in tiny.target_bf16_path().iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name


def test_pictures_that_it_has_not_seen_are_read_and_used():
    found = sight(tiny.target_path(), 24)
    # docs/tiny.md has the shares of 100; these leave room for what 24 can miss by chance.
    assert found.read >= 0.75 and found.solved >= found.solved_without - 0.15, found


def test_a_missing_checkpoint_is_one_clear_error(monkeypatch, tmp_path):
    monkeypatch.setattr(tiny, "WEIGHTS", tmp_path)
    with pytest.raises(KimiError, match="make tiny"):
        tiny.target_path()


@pytest.fixture(scope="module")
def transformers_target(tmp_path_factory):
    """transformers' own DeepseekV3ForCausalLM on the text part of the BF16 checkpoint, float32."""
    torchvision_ops.declare_missing()
    with pytest.MonkeyPatch.context() as patch:  # sklearn and pandas, for a kind of assisted generation: a second
        patch.setitem(sys.modules, "sklearn", None)
        from transformers import DeepseekV3ForCausalLM

    folder = tmp_path_factory.mktemp("text-model")
    tensors = read_tensors(tiny.target_bf16_path()).items()
    tensors = {name.removeprefix(PREFIX): t for name, t in tensors if name.startswith(PREFIX)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(text_config_json(C)))
    model, info = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    yield model.eval()
    shutil.rmtree(folder)


@torch.no_grad()
def test_transformers_computes_the_same(transformers_target):
    ours = load_target(tiny.target_bf16_path()).float()
    tokens = torch.randint(8, C.vocab, (2, 600), generator=torch.Generator().manual_seed(1))  # far beyond training
    theirs = transformers_target(tokens, output_hidden_states=True)
    logits, states = ours(tokens)
    torch.testing.assert_close(logits, theirs.logits, rtol=2e-3, atol=2e-3)
    for layer in DraftConfig().captured:  # the state entering layer i is transformers' hidden_states[i]
        torch.testing.assert_close(states[layer], theirs.hidden_states[layer], rtol=2e-3, atol=2e-3)


@torch.no_grad()
def test_transformers_generates_the_same_greedy_tokens(transformers_target):
    ours = load_target(tiny.target_bf16_path()).float()
    tokenizer = load_tokenizer(tiny.target_path())
    for problem in problems("held_out", 4):
        prompt = tokenizer.encode(chat_text(problem.question)).ids
        theirs = transformers_target.generate(torch.tensor([prompt]), max_new_tokens=60, do_sample=False)
        assert greedy(ours, [prompt], 60)[0] == theirs[0, len(prompt) :].tolist()


def test_recorded_metrics_meet_the_bars():
    record = json.loads(tiny.METRICS.read_text())
    result = TypeAdapter(TinyEvaluation).validate_python(record["evaluation"])
    assert result.held_out_problems >= 500
    assert result.ok, result.checks()
    folders = [tiny.target_path(), tiny.target_bf16_path(), tiny.draft_path()]
    assert result.weight_bytes == weight_bytes(folders)


def test_bars_hold_when_recomputed_on_a_sample():
    texts = examination()[::60]
    result = evaluate(tiny.target_path(), tiny.target_bf16_path(), tiny.draft_path(), 3, texts=texts)
    assert {kind for shares in result.typed.values() for kind in shares} == {"sum", "story", "other"}
    for name, form in result.forms.items():
        assert min(form.right_bf16, form.right_w4a8) >= 2 / 3, name
        assert form.accept_length >= 2.5, name
    assert len({form.reply_tokens for form in result.forms.values()}) == len(result.forms)  # each form's own replies

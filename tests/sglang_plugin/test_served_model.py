"""The plugin acts on Kimi's models and on checkpoints in its formats, and changes nothing for another model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.sglang_program import BOTH, found

from kimi_w4a8_eagle3.sglang_plugin.served_model import is_foreign

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
DEEPSEEK = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
FP8, INT4 = ({"dtype": dtype, "qscheme": scheme, "ch_axis": 0, "is_dynamic": False}
             for dtype, scheme in (("fp8_e4m3", "per_tensor"), ("int4", "per_channel")))  # fmt: skip


def quark(*stages: dict[str, Any]) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "quark", "global_quant_config": {"weight": [*stages]}}}


@pytest.mark.parametrize(
    ("config", "foreign"),
    [
        (LLAMA, True),
        (DEEPSEEK, True),
        ({**DEEPSEEK, **quark(FP8)}, True),
        ({**DEEPSEEK, **quark(FP8, INT4)}, False),
        ({"text_config": {**DEEPSEEK, **quark(FP8, INT4)}}, False),
        ({"model_type": "kimi_k25"}, False),
        ({**DEEPSEEK, "model_type": "kimi_k2"}, False),
        ([], False),
    ],
)
@pytest.mark.parametrize("words", ["--tp 2 --model-path {}", "--model={} --tp 2", "--model no --model-path {}"])
def test_other_models_are_told_by_their_config(config: Any, foreign: bool, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert is_foreign(words.format(tmp_path).split()) is foreign


@pytest.mark.parametrize("words", ["", "--model-path", "--model-path /no/folder", "--port 1", "program"])
def test_where_the_model_cannot_be_told_the_plugin_acts(words: str) -> None:
    assert not is_foreign(words.split())


def test_a_repository_of_the_hub_is_told_by_the_file_in_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    asked = []

    def cached(name: str, file: str, revision: str | None) -> str:
        asked.append((name, file, revision))
        return str(tmp_path / file)

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", cached)
    assert is_foreign(["--model-path", "owner/name", "--revision", "abc"])
    assert asked == [("owner/name", "config.json", "abc")]


LOADED = """
import json
from sglang.srt.plugins.hook_registry import HookRegistry
ours = [name for name, hooks in HookRegistry._hooks.items() for _, hook, _ in hooks
        if hook.__module__.startswith("kimi_w4a8_eagle3")]
print(json.dumps({"hooked": len(ours)}))
"""


@BOTH
def test_sglang_stays_as_it_is_for_another_model_and_is_hooked_for_kimis(newest: bool, tmp_path: Path) -> None:
    results = []
    for name, config in (("llama", LLAMA), ("kimi", {"model_type": "kimi_k25"})):
        (folder := tmp_path / name).mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        results.append(found(LOADED, newest, "--model-path", str(folder)))
    assert results[0]["hooked"] == 0 and results[1]["hooked"] > 30

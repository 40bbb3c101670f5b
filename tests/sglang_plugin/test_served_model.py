"""The plugin acts on Kimi's models and on checkpoints in its formats, and changes nothing for another model."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from support.fetch_helpers import at_endpoint
from support.hub_server import Repo, serve
from support.sglang_program import BOTH, found

from kimi_w4a8_eagle3.sglang_plugin import served_model
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


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of huggingface_hub, and a silent Hub that is given up after 0.2 s."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(served_model, "_HUB_S", 0.2)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tmp_path


def test_a_repository_of_the_hub_is_told_by_a_file_that_is_fetched_once(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama, kimi = (Repo({"config.json": json.dumps(config).encode()}) for config in (LLAMA, {"model_type": "kimi_k2"}))
    kimi.branches = ("main", "v2")
    with serve({"org/llama": llama, "org/kimi": kimi, "org/closed": Repo(llama.files, token="x")}) as hub:
        at_endpoint(monkeypatch, hub.endpoint)
        for _ in range(2):
            assert is_foreign(["--model-path", "org/llama"])
            assert not is_foreign(["--model-path", "org/kimi", "--revision", "v2"])
        assert len(hub.gets("config.json")) == 2
        for absent in ("org/closed", "org/nothing", "org//kimi"):
            assert not is_foreign(["--model-path", absent])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert is_foreign(["--model-path", "org/llama"]) and not is_foreign(["--model-path", "org/other"])


@pytest.mark.parametrize("listens", [True, False])
def test_a_hub_that_does_not_answer_ends_no_start(home: Path, monkeypatch: pytest.MonkeyPatch, listens: bool) -> None:
    """It is asked once: more would wait for minutes, which would end this test by its time limit."""
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: pytest.fail("it repeats"))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listens:
            silent.listen()
        at_endpoint(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert not is_foreign(["--model-path", "org/llama"])


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

"""The guard inside SGLang: its own hook registry, its own pool sizing, the built-in target and draft."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.sglang_program import RELEASES, VERSIONS, run

from kimi_w4a8_eagle3.machine.page_guard import INT32_MAX
from kimi_w4a8_laptop.tiny import DRAFT, TARGET, WEIGHTS


@pytest.fixture(scope="module", params=RELEASES, ids=VERSIONS)
def sized(request: pytest.FixtureRequest) -> dict[str, int]:
    draft = json.loads((WEIGHTS / DRAFT / "config.json").read_text())
    program = Path(__file__).with_name("sglang_sizing.py").read_text()
    done = run(program, request.param, str(WEIGHTS / TARGET), str(WEIGHTS / DRAFT))
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert results["draft_row_elements"] == [draft["num_key_value_heads"] * draft["head_dim"]]
    return {**results, "row": results["draft_row_elements"][0], "log": done.stderr}


def test_other_attention_backends_are_left_alone(sized: dict[str, int]) -> None:
    assert sized["auto"] == sized["requested"]


def test_an_aiter_pool_is_capped_at_the_drafts_limit(sized: dict[str, int]) -> None:
    row = sized["row"]
    assert sized["auto_on_aiter"] == sized["force"] == INT32_MAX // row
    assert sized["force"] * row <= INT32_MAX < (sized["force"] + 1) * row
    assert "page-offset guard: KV pool capped from 50,000,000,000" in sized["log"]


def test_the_gates_force_lower_and_switch_off(sized: dict[str, int]) -> None:
    assert sized["force_small"] == 128000 // sized["row"]
    assert sized["off"] == sized["requested"]


def test_an_mla_model_without_a_draft_is_capped_at_its_window(sized: dict[str, int]) -> None:
    (row,) = sized["mla_row_elements"]
    assert sized["no_draft_on_aiter"] == 2**32 // (2 * row) - 1

"""The gate table: types, refusals with the nearest name, warnings, and that it covers what the recipes set."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.variable import FALSE, TRUE
from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_eagle3.gates import BY_NAME, TABLE, ignored_gates, read_gates
from kimi_w4a8_eagle3.recipe.launch import load_recipe, recipe_names


def test_the_table_covers_every_variable_of_the_recipes() -> None:
    large = [name for name in recipe_names() if name != "tiny"]  # which sets switches of the CPU engine and of torch
    used = {name for recipe in large for name in load_recipe(recipe).environment}
    assert used <= set(BY_NAME)
    assert len(used) == 23


def test_names_are_unique_and_rows_complete() -> None:
    assert len(BY_NAME) == len(TABLE)
    for gate in TABLE:
        assert gate.reader and gate.effect and gate.expected, gate.name
        if gate.default is not None and gate.allowed:
            assert gate.default in gate.allowed, gate.name


def test_nothing_set_gives_the_defaults() -> None:
    gates = read_gates({"PATH": "/bin"})
    assert (gates.moe_backend, gates.check_model_name, gates.page_guard) == ("auto", False, "auto")
    assert gates.page_guard_int_max == 2**31 - 1
    assert gates.get("KIMI_MOE_BACKEND") is None


def test_values_are_typed() -> None:
    gates = read_gates(load_recipe("eagle3-opt").environment)
    assert gates.get("FLYDSL_MOE_STAGE1_SCHED") is False and gates.get("AITER_FLYDSL_STAGE2_TILE_K") == 256
    own = {"KIMI_MOE_BACKEND": "triton", "KIMI_PAGE_GUARD": "off", "KIMI_PAGE_GUARD_INT_MAX": "7"}
    gates = read_gates({**own, "KIMI_CHECK_MODEL_NAME": "1"})
    assert (gates.moe_backend, gates.page_guard, gates.page_guard_int_max) == ("triton", "off", 7)
    assert gates.check_model_name is True


@pytest.mark.parametrize("text", [*TRUE, *FALSE])
def test_booleans_have_the_spellings_that_the_readers_know(text: str) -> None:
    assert read_gates({"FLYDSL_MOE_STAGE1_SCHED": text}).get("FLYDSL_MOE_STAGE1_SCHED") == (text in TRUE)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("AITER_FLYDSL_STAGE2_TILE_K", "100", "64, 128, 256"),
        ("AITER_FLYDSL_STAGE1_TILE_N", "48", "32, 64, 128, 256"),
        ("AITER_FLYDSL_STAGE1_TILE_M", "", "16, 32, 48, 64, 128"),
        ("FLYDSL_MOE_STAGE1_SCHED", "TRUE", "0 or 1"),  # AITER and FlyDSL would read it as false
        ("KIMI_MOE_BACKEND", "cuda", "auto, flydsl, triton, reference"),
        ("FLYDSL_W4A16_HYBRID", "w1_bf16", "w2_bf16"),
        ("TRITON_MAX_CACHE_SIZE", "2GB", "a whole number >= 0"),
        ("AITER_FLYDSL_MOE_COMPARE_MAX_ABS", "-1", "a number >= 0"),
    ],
)
def test_out_of_range_is_an_error_with_what_is_allowed(name: str, value: str, expected: str) -> None:
    with pytest.raises(KimiError) as caught:
        read_gates({name: value})
    assert name in caught.value.what and repr(value) in caught.value.what
    assert expected in caught.value.expected


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("AITER_FLYDSL_STAGE2_TILEK", "AITER_FLYDSL_STAGE2_TILE_K"),
        ("FLYDSL_MOE_STAGE1_SHED", "FLYDSL_MOE_STAGE1_SCHED"),
        ("AITER_W4A8_INT8", "AITER_W4A8_USE_INT8"),
        ("AITER_USE_FLYDSL_MOE_STAGE3", "AITER_USE_FLYDSL_MOE_STAGE"),
        ("KIMI_MOE_BACKND", "KIMI_MOE_BACKEND"),
    ],
)
def test_a_misspelt_gate_names_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(KimiError, match=f"{wrong}; did you mean '{right}"):
        read_gates({wrong: "1"})


@pytest.mark.parametrize(
    "name", ["KIMI_API_KEY", "FLYDSL_DUMP_IR", "FLYDSL_RUNTIME_CACHE_DIR", "AITER_FLYDSL_AOT_WORKERS", "AITER_LOG_MORE"]
)
def test_variables_of_other_programs_are_ignored(name: str) -> None:
    assert read_gates({name: "anything"}).given == {}


def test_a_gate_that_the_backend_ignores_is_a_warning() -> None:
    tile = read_gates({"AITER_FLYDSL_STAGE2_TILE_K": "256"})
    assert "no effect on the MoE backend 'triton'" in ignored_gates(tile, "triton")[0]
    assert ignored_gates(tile, "flydsl") == []


def test_only_a_value_that_would_change_something_warns() -> None:
    assert ignored_gates(read_gates(load_recipe("w4a8").environment), "flydsl") == []
    w4a16 = read_gates(load_recipe("w4a16").environment)
    assert ignored_gates(w4a16, "flydsl") == []
    assert "FLYDSL_W4A16_HYBRID" in " ".join(ignored_gates(w4a16, "triton"))
    assert len(ignored_gates(read_gates({"AITER_W4A8_USE_INT8": "0"}), "reference")) == 1


def test_kimi_gates_shows_value_and_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYDSL_MOE_STAGE2_SCHED", "0")
    result = CliRunner().invoke(app, ["gates", "--recipe", "eagle3-opt", "--json"])
    assert result.exit_code == 0
    rows = {row["name"]: (row["value"], row["origin"]) for row in json.loads(result.stdout)["gates"]}
    assert rows["FLYDSL_MOE_STAGE1_SCHED"] == (False, "recipe")
    assert rows["FLYDSL_MOE_STAGE2_SCHED"] == (False, "environment")
    assert rows["AITER_FLYDSL_MOE_GRID_TRIM"] == (True, "default")
    text = CliRunner().invoke(app, ["gates"]).stdout
    assert "AITER_FLYDSL_MOE_COMPARE_STAGE2" in text  # no name is broken over lines


def test_kimi_gates_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["gates", "--recipe", "eagle3-opt", "--moe-backend", "triton", "--json"])
    assert any("AITER_FLYDSL_STAGE2_TILE_K" in warning for warning in json.loads(result.stdout)["warnings"])


def test_kimi_gates_refuses_a_misspelt_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AITER_FLYDSL_STAGE2_TILEK", "256")
    result = CliRunner().invoke(app, ["gates"])
    assert result.exit_code != 0 and isinstance(result.exception, KimiError)

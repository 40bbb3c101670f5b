"""Recipes: inheritance, refusal of mistakes, overrides, notes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.finding import Finding, Severity
from kimi_w4a8_eagle3.machine.aiter_regime import Regime
from kimi_w4a8_eagle3.machine.hardware import GIB, Device, Machine
from kimi_w4a8_eagle3.recipe.launch import load_recipe, render, unmet_requirements
from kimi_w4a8_lab.base.server_under_test import Target
from kimi_w4a8_lab.speed import published

NO_GPU = Machine()
NUMA = [0, 0, 1, 1, 2, 2, 3, 3]
MI325X = Machine(tuple(Device("gfx942", 304, f"0000:{i:02x}:00.0", node, 256 * GIB) for i, node in enumerate(NUMA)))
SERVED = ["agent", "agent-fast", "agent-mxfp4", "eagle3", "eagle3-mi300x", "eagle3-mla", "eagle3-opt"]
SERVED += ["w4a16", "w4a8"]
UNSCALED = "env.SGLANG_AITER_HONOR_EXPLICIT_MEM_FRACTION=1"  # SGLang uses the fraction as it is


def write(folder: Path, text: str, name: str = "mine") -> Path:
    path = folder / f"{name}.toml"
    path.write_text(text, "utf-8-sig")
    return path


def eight(arch: str, gib: int) -> Machine:
    return Machine(tuple(Device(arch, 304, "p", 0, gib * GIB) for _ in range(8)))


def value_of(argv: list[str], name: str) -> str:
    return argv[argv.index(f"--{name}") + 1]


def test_eagle3_and_eagle3_opt_differ_in_exactly_two_gates() -> None:
    base, opt = load_recipe("eagle3"), load_recipe("eagle3-opt")
    hidden = {"name", "summary", "env"}
    assert base.model_dump(exclude=hidden) == opt.model_dump(exclude=hidden)
    extra = dict(opt.environment.items() - base.environment.items())
    assert extra == {"FLYDSL_MOE_STAGE1_SCHED": "0", "AITER_FLYDSL_STAGE2_TILE_K": "256"}
    assert not base.environment.items() - opt.environment.items()


def test_w4a16_replaces_the_int8_gate_by_the_bf16_one() -> None:
    assert load_recipe("w4a16").environment["FLYDSL_W4A16_HYBRID"] == "w2_bf16"
    assert "AITER_W4A8_USE_INT8" not in load_recipe("w4a16").environment


def test_published_figures_are_not_inherited() -> None:
    con40, source = published.reported("eagle3-opt", "con40")
    assert con40["tpot_median_ms"] == 27.41 and "2026-06-23" in source
    assert "ttft_median_ms" not in con40
    assert published.reported("tiny", "con40") == ({}, "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sumary = 'x'", "unknown key 'sumary'; did you mean 'summary'?"),
        ("[options]\nspeculaton = 'fixed'", "unknown key 'options.speculaton'; did you mean 'speculation'?"),
        ("[draft]\nrepo = 'a/b'\nrevison = 'main'", "unknown key 'draft.revison'; did you mean 'revision'?"),
        ("[options]\nspeculation = 'hot'", "options.speculation: Input should be"),
        ("[hardware]\ngpus = -1", "hardware.gpus"),
        ("[env]\nX = true", "env.X"),
        ("[improve.port]\nvalue = 1\nwhy = ''", "improve.port.why"),
        ("engine = 'vllm'", "unknown key 'engine'"),
        ("summary = ", "not valid TOML"),
    ],
)
def test_a_mistake_is_one_sentence_with_the_file(tmp_path: Path, text: str, message: str) -> None:
    extends = "" if "summary = " in text else 'extends = "eagle3"\nsummary = "s"\n'
    path = write(tmp_path, extends + text)
    with pytest.raises(KimiError) as caught:
        load_recipe(path)
    assert message in caught.value.what
    assert str(path) in caught.value.where


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("eagle3-opts", "did you mean 'eagle3-opt'"),
        ("tiny:fast", "unknown suffix 'fast' of the recipe 'tiny'.*tiny:plain"),
        ("{folder}/none.toml", "no recipe file"),
        ("{folder}/modelless.toml", "the key 'model' is missing"),
        ("{folder}/b.toml", "circle"),
        ("{folder}/c.toml", "no recipe file none.toml.*/c.toml, extends"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_refused(tmp_path: Path, name: str, message: str) -> None:
    write(tmp_path, 'summary = "s"', "modelless")
    for one, other in (("a", "b.toml"), ("b", "a"), ("c", "none.toml")):
        write(tmp_path, f'extends = "{other}"', one)
    with pytest.raises(KimiError) as caught:
        load_recipe(name.format(folder=tmp_path))
    assert re.search(message, str(caught.value), re.DOTALL)


def test_plain_takes_the_draft_away_and_nothing_else(tmp_path: Path) -> None:
    drafts, plain = (render(load_recipe(name), machine=MI325X) for name in ("agent", "agent:plain"))
    gone = {name for name in drafts.args if name.startswith("speculative-")} | {"max-total-tokens"}
    kept = {name: value for name, value in drafts.args.items() if name not in gone}
    pool = plain.args["max-total-tokens"]
    assert kept | {"max-total-tokens": pool} == plain.args and len(gone) > 5
    assert pool > drafts.args["max-total-tokens"]  # where the draft's weights and KV were
    assert (
        plain.args["context-length"] == 131072
        and plain.args["disable-radix-cache"] is False
        and plain.env == drafts.env
    )
    assert (plain.name, plain.draft, plain.recipe.draft) == ("agent:plain", None, None)
    assert any("options.speculation is 'off': the draft" in note.found for note in plain.notes)
    assert render(load_recipe("agent"), ["options.speculation=off"], machine=MI325X).args == plain.args
    path = write(tmp_path, 'extends = "agent"\nsummary = "s"\n[options]\nspeculation = "off"')
    assert render(load_recipe(path), machine=MI325X).args == plain.args
    assert load_recipe(f"{path}:plain").name == "mine:plain"


def test_a_recipe_of_ones_own_extends_a_packaged_one(tmp_path: Path) -> None:
    args, env = "[args]\nport = 1234\nmax-running-requests = 32\n", "[env]\nHIP_FORCE_DEV_KERNARG = 0"
    recipe = load_recipe(write(tmp_path, f'extends = "agent"\nsummary = "mine"\n{args}{env}'))
    assert (recipe.args["tp-size"], recipe.name, recipe.environment["HIP_FORCE_DEV_KERNARG"]) == (8, "mine", "0")
    assert [value_of(render(recipe, []).argv, name) for name in ("port", "max-running-requests")] == ["1234", "32"]


def test_settings_and_trailing_arguments_win_and_are_shown() -> None:
    launch = render(
        load_recipe("eagle3"),
        ["port=8000", "env.AITER_FLYDSL_DEBUG=1"],
        ["--watchdog-timeout", "60", "--numa-node", *"00001111", "--tool-call-parser=kimi_k2", "--enable-dp-lm-head"],
        machine=NO_GPU,
    )
    assert value_of(launch.argv, "port") == "8000" and launch.port == 8000
    assert value_of(launch.argv, "watchdog-timeout") == "60" and launch.argv.count("--watchdog-timeout") == 1
    assert launch.argv[launch.argv.index("--numa-node") + 1 :][:8] == list("00001111")
    assert value_of(launch.argv, "tool-call-parser") == "kimi_k2" and "--enable-dp-lm-head" in launch.argv
    assert launch.env["AITER_FLYDSL_DEBUG"] == "1"
    for shown in ("--port 8000", "env.AITER_FLYDSL_DEBUG=1", "--watchdog-timeout 60", "--tool-call-parser kimi_k2"):
        assert Finding(shown, Severity.OVERRIDE) in launch.notes


def test_other_spellings_of_an_argument_replace_it() -> None:
    launch = render(load_recipe("w4a8"), [], ["--tp", "4", "--model", "/models/x"], machine=NO_GPU)
    assert value_of(launch.argv, "tp-size") == "4" and launch.tensor_parallel == 4
    assert "--tp" not in launch.argv and launch.model == "/models/x"


def test_a_recipe_that_runs_code_of_its_own_is_named(tmp_path: Path) -> None:
    env = '[env]\nLD_PRELOAD = "/x.so"\nOMP_NUM_THREADS = "2"\n'
    env += '[improve."env.SGLANG_PLUGINS"]\nvalue = "none"\nwhy = "as a stranger likes it"'
    mine = write(tmp_path, f'extends = "tiny"\nsummary = "s"\n{env}')
    warned = [note.found for note in render(load_recipe(mine)).notes if "trusted as code" in note.found]
    assert [re.findall(r"sets (\w+)=", text) for text in warned] == [["LD_PRELOAD"], ["SGLANG_PLUGINS"]]
    assert not any("trusted as code" in note.found for name in SERVED for note in render(load_recipe(name)).notes)


@pytest.mark.parametrize("value", ["1e5", "0123", "2.10", '{"a": 1}', "1_000"])
def test_a_value_reaches_the_engine_as_it_was_typed(value: str) -> None:
    launch = render(load_recipe("w4a8"), [f"revision={value}"], ["--served-model-name", value], machine=NO_GPU)
    assert value_of(launch.argv, "revision") == value_of(launch.argv, "served-model-name") == value


def test_numa_list_comes_from_the_machine() -> None:
    launch = render(load_recipe("eagle3"), machine=MI325X)
    at = launch.argv.index("--numa-node")
    assert launch.argv[at + 1 : at + 9] == [str(node) for node in NUMA]
    assert any("from this machine's PCI" in note.found for note in launch.notes)


def test_numa_list_is_left_out_when_it_cannot_be_right() -> None:
    launch = render(load_recipe("w4a8"), ["tp-size=4"], machine=NO_GPU)
    assert "--numa-node" not in launch.argv
    assert any(note.found.startswith("--numa-node left out") for note in launch.notes)


def test_a_moving_revision_is_warned_about_and_a_pinned_one_passed() -> None:
    assert sum("moving revision" in note.found for note in render(load_recipe("eagle3"), machine=NO_GPU).notes) == 2
    other = render(load_recipe("eagle3"), [], ["--model", "/models/x"], machine=NO_GPU)
    assert sum("moving revision" in note.found for note in other.notes) == 1
    commit = "0123456789abcdef0123456789abcdef01234567"
    pinned = render(load_recipe("eagle3"), [f"model.revision={commit}"], machine=NO_GPU)
    assert sum("moving revision" in note.found for note in pinned.notes) == 1
    assert value_of(pinned.argv, "revision") == commit


@pytest.mark.parametrize(
    ("machine", "told"),
    [
        (NO_GPU, "this machine has 0 AMD GPUs, the recipe needs 8 (gfx942)"),
        (eight("gfx950", 288), "the GPUs are gfx950, the recipe is made for gfx942"),
        (eight("gfx942", 191), "a GPU here has 191 GiB of memory, the recipe is made for 256"),
    ],
)
def test_missing_hardware_is_warned_about(machine: Machine, told: str) -> None:
    assert Finding(told, Severity.WARN) in render(load_recipe("eagle3"), machine=machine).notes
    assert Finding(told, Severity.WARN) not in render(load_recipe("eagle3"), machine=MI325X).notes


def test_with_a_draft_every_aiter_gives_the_same_pool_below_the_tried_ceiling() -> None:
    """A laptop has no AITER, an image has one with 64-bit offsets."""
    pools = set()
    for regime in Regime:
        launch = render(load_recipe("eagle3"), machine=MI325X, regime=regime)
        pools.add((launch.args["mem-fraction-static"], launch.args["max-total-tokens"]))
        assert any("at most 0.824 of the memory (options.memory_ceiling)" in note.found for note in launch.notes)
    assert pools == {(0.824, 1_702_894)}


HIGH = ["options.memory_ceiling=0.9", UNSCALED]


@pytest.mark.parametrize(
    ("recipe", "settings", "regime", "fraction", "pool", "told"),
    [
        ("eagle3", HIGH, Regime.UNKNOWN, None, 2_097_151, "over the published 0.8"),
        ("eagle3", [UNSCALED, "mem-fraction-static=0.9"], Regime.UNKNOWN, "0.9", 2_097_151, "page-offset guard"),
        ("eagle3", ["max-total-tokens=100000"], Regime.UNKNOWN, "0.824", 100_000, "page-offset guard"),
        ("eagle3", ["max-total-tokens=9000000"], Regime.UNKNOWN, "0.824", 1_702_894, "page-offset guard"),
        ("eagle3", HIGH, Regime.FIXED64, "0.9", 2_374_650, "at most 0.9 of the memory"),
        ("w4a8", [], Regime.UNKNOWN, "0.9", None, ""),
    ],
    ids=["auto", "own fraction", "own small pool", "own large pool", "64-bit kernel", "published"],
)
def test_the_pool_is_the_largest_that_is_safe(
    recipe: str, settings: list[str], regime: Regime, fraction: str | None, pool: int | None, told: str
) -> None:
    launch = render(load_recipe(recipe), settings, machine=MI325X, regime=regime)
    assert launch.args.get("max-total-tokens") == pool
    assert 0.80 < float(value_of(launch.argv, "mem-fraction-static")) <= 0.9
    assert fraction in (None, value_of(launch.argv, "mem-fraction-static"))
    assert any(told in note.found for note in launch.notes)


@pytest.mark.parametrize("name", SERVED)
def test_shell_text_can_be_pasted(name: str) -> None:
    text = render(load_recipe(name), ["served-model-name=a b"], machine=NO_GPU).shell()
    lines = text.splitlines()
    assert lines[0].startswith("export ") and "python -m sglang.launch_server \\" in lines
    assert any("--served-model-name 'a b'" in line for line in lines)


def test_a_cpu_recipe_needs_lscpu_which_sglang_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, machine = load_recipe("tiny"), Machine(())
    assert unmet_requirements(tiny, machine) == []
    monkeypatch.setenv("PATH", "")
    assert unmet_requirements(tiny, machine) == ["SGLang runs the program lscpu on a CPU: apt-get install util-linux"]
    with pytest.raises(KimiError, match="this machine cannot serve the recipe 'tiny': SGLang runs the program lscpu"):
        Target(recipe="tiny").check()

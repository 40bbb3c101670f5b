"""The table of known faults: which launch each concerns, over versions and arguments, and what happens then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.finding import Severity
from kimi_w4a8_eagle3.base.releases import SGLANG_NEWEST, SGLANG_PINNED
from kimi_w4a8_eagle3.machine.hardware import GIB, Device, Machine
from kimi_w4a8_eagle3.recipe.launch import Launch, load_recipe, render, resolve
from kimi_w4a8_eagle3.recipe.on_machine import concerning, known_faults
from kimi_w4a8_eagle3.supervision.checks import checked

EIGHT = tuple(Device("gfx942", 304, f"{i:02x}", 0, 256 * GIB) for i in range(8))
TRIED = [(0, 5, patch) for patch in range(20, 24)]
PINNED = {"sglang": SGLANG_PINNED, "rocm": "7.2.4", "aiter": "0.1.20", "torch": "2.11.0"}
NO_GRAPHS, HOST_CACHE = "disable-cuda-graph=true", "enable-hierarchical-cache=true"

suffixes = st.sampled_from(["", "a1", "rc1", ".post1", "+rocm724"])
versions = st.builds("0.{}.{}{}".format, st.integers(4, 6), st.integers(0, 30), suffixes)


def ids(**more: object) -> list[str]:
    given = {"args": {}, "env": {}, "arch": "gfx942", "installed": {}} | more
    return [fault.id for fault in concerning(**given)]


def launch(recipe: str = "eagle3", *settings: str, **installed: str) -> Launch:
    return render(load_recipe(recipe), settings, machine=Machine(EIGHT, installed))


@given(version=versions)
def test_a_release_of_sglang_is_one_that_was_tried_or_gets_one_message(version: str) -> None:
    found = [name for name in ids(installed={"sglang": version}) if name.startswith("sglang")]
    release = Version(version).release
    if release in TRIED:
        assert found == []
    elif release < (0, 5, 16):
        assert found == ["sglang-before-0-5-16"]
    elif release < (0, 5, 18):
        assert found == ["sglang-0-5-16"]
    else:
        assert found == ["sglang-untried"]


@given(tokens=st.integers(1, 64), arch=st.sampled_from(["gfx942", "gfx950", None]))
def test_long_drafts_are_refused_where_they_verify_wrongly(tokens: int, arch: str | None) -> None:
    args = {"attention-backend": "aiter", "speculative-num-draft-tokens": tokens}
    assert ("mla-verify-length" in ids(args=args, arch=arch)) == (arch == "gfx942" and tokens > 4)


@pytest.mark.parametrize(
    ("name", "given", "other"),
    [
        ("rocm-fused-moe-nan", {"installed": {"rocm": "7.14.0"}}, {"installed": {"rocm": "7.2.4"}}),
        ("rocm-fused-moe-nan", {"installed": {"rocm": "10.0.0"}}, {"installed": {"rocm": "10.0.0"}, "arch": "gfx950"}),
        (
            "dp-attention-drafts",
            {"args": {"enable-dp-attention": True, "speculative-algorithm": "EAGLE3"}},
            {"args": {"enable-dp-attention": True}},
        ),
        (
            "graphs-triton-moe-drafts",
            {"args": {"speculative-algorithm": "EAGLE3", "moe-runner-backend": "triton"}},
            {"args": {"speculative-algorithm": "EAGLE3"}},
        ),
    ],
)
def test_what_others_reported_is_warned_of(name: str, given: dict[str, object], other: dict[str, object]) -> None:
    assert name in ids(**given) and name not in ids(**other)


@pytest.mark.parametrize("version", ["", "main", "unknown"])
def test_what_is_not_here_or_cannot_be_read_has_no_known_fault(version: str) -> None:
    assert ids(installed={"sglang": version}) == ids()


@pytest.mark.parametrize("version", ["0.5.16", "0.5.10rc0"])
def test_a_refused_launch_does_not_start_until_a_person_accepts_it(version: str) -> None:
    with pytest.raises(KimiError) as refused:
        checked(launch(sglang=version))
    assert "0.5.16" in refused.value.what and "https://" in refused.value.what
    assert f"install SGLang {SGLANG_PINNED}" in refused.value.remedy and "options.accept_faults" in refused.value.remedy
    name = refused.value.where.rpartition(" ")[2]
    accepted = launch("eagle3", f'options.accept_faults=["{name}"]', sglang=version)
    assert accepted.refused == []
    assert any(
        note.severity is Severity.OVERRIDE and f"the known fault {name} is accepted" in note.found
        for note in accepted.notes
    )


def test_an_argument_that_was_not_given_is_set_and_another_value_is_warned_about() -> None:
    unspeculated = launch("w4a8")
    assert "disable-custom-all-reduce" not in unspeculated.args
    words = ["speculative-algorithm=EAGLE", "speculative-num-draft-tokens=4"]
    speculated = launch("w4a8", *words)
    assert speculated.args["disable-custom-all-reduce"] is True
    assert any(
        note.found.startswith("--disable-custom-all-reduce: ") and "29313" in note.found for note in speculated.notes
    )
    insisting = launch("eagle3", "disable-custom-all-reduce=false")
    assert insisting.args["disable-custom-all-reduce"] is False
    assert any(note.severity is Severity.WARN and "29313" in note.found for note in insisting.notes)
    assert not any("29313" in note.found for note in launch("eagle3").notes if note.severity is Severity.WARN)


@pytest.mark.parametrize(
    ("recipe", "settings", "installed", "refused"),
    [
        ("eagle3", ["kv-cache-dtype=fp8_e5m2"], {}, ["fp8-kv-e5m2"]),
        ("eagle3", ["kv-cache-dtype=fp8_e4m3"], {}, []),
        ("eagle3", ["kv-cache-dtype=fp8_e4m3", "attention-backend=triton"], {}, ["fp8-kv-triton"]),
        ("agent", [], {}, []),
        ("agent", [NO_GRAPHS], {}, ["eagle-without-graphs"]),
        ("agent:plain", [NO_GRAPHS], {}, []),
        ("agent", [NO_GRAPHS], {"sglang": SGLANG_NEWEST}, []),
        ("agent", [HOST_CACHE], {}, []),
        ("agent", [HOST_CACHE, "hicache-io-backend=kernel"], {}, ["host-cache-kernel"]),
        ("eagle3", [HOST_CACHE], {}, ["host-cache-without-prefixes"]),
        ("agent", [], {"aiter": "0.1.10.post2"}, ["aiter-prefill-hang"]),
        ("agent", [], {"aiter": "0.1.11"}, []),
    ],
)
def test_a_launch_is_refused_for_its_faults(
    recipe: str, settings: list[str], installed: dict[str, str], refused: list[str]
) -> None:
    assert [fault.id for fault in launch(recipe, *settings, **PINNED | installed).refused] == refused


@pytest.mark.parametrize("recipe", ["agent", "agent-fast", "agent-mxfp4", "eagle3", "eagle3-mla", "eagle3-opt"])
def test_graphs_cover_every_batch_of_drafts_that_can_run(recipe: str) -> None:
    args = launch(recipe).args
    running = args.get("max-running-requests", 48)  # SGLang's default with speculation
    assert args.get("cuda-graph-max-bs-decode", running) >= running


def test_an_fp8_cache_is_warned_of_until_it_is_measured() -> None:
    found = launch("eagle3", "kv-cache-dtype=fp8_e4m3")
    assert any("eval gsm8k --baseline" in note.found for note in found.notes)
    assert not any("e4m3fnuz" in note.found for note in launch("eagle3").notes)


@pytest.mark.parametrize("recipe", ["agent", "w4a16", "w4a8", "eagle3", "eagle3-mla", "eagle3-opt"])
def test_the_recipes_have_no_fault_but_the_published_all_reduce(recipe: str) -> None:
    found = launch(recipe, **PINNED)
    concerned = concerning(found.args, found.env, "gfx942", PINNED)
    only = [("custom-all-reduce-race", Severity.WARN)] if recipe in ("w4a16", "w4a8") else []  # no hang of it is known
    assert [(fault.id, fault.severity) for fault in concerned] == only


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("verdict = 'refuse'", "what"),
        ("verdict = 'stop'", "verdict"),
        ("installed.sglang = '0.5.16'", "compares nothing"),
        ("installed.sglan = '<1'", "installed"),
        ("args.page-size = '>x'", "compares nothing"),
        ("arc = ['gfx942']", "arc"),
        ("verdict = ", "Invalid value"),
    ],
)
def test_a_mistake_in_the_table_is_an_error(tmp_path: Path, entry: str, message: str) -> None:
    path = tmp_path / "faults.toml"
    path.write_text(f"[some-fault]\n{entry}\n")
    with pytest.raises(KimiError) as caught:
        known_faults(path)
    assert message in caught.value.what and caught.value.where == str(path)


@pytest.mark.parametrize(
    ("version", "untried"),
    [
        ("0.5.20.post1+rocm724", False),
        ("0.5.20.dev20260920+gc610c40399", False),  # main two days after 0.5.20
        ("0.5.19.dev20260919+gffe98a4279", False),  # the same, named after the tag before
        ("0.5.23.dev20261101+g1234567", False),
        ("0.5.19.dev20260909+gffe98a4279", True),
        ("0.5.20.dev20260917", True),
        ("0.5.19", True),
        ("0.5.24.dev20261201", True),
        ("0.5.24", True),
    ],
)
def test_nightly_builds_since_the_pinned_release_are_tried(version: str, untried: bool) -> None:
    assert ("sglang-untried" in ids(installed={"sglang": version})) == untried


@pytest.mark.parametrize("recipe", ["w4a8", "w4a16", "eagle3", "agent"])
def test_no_recipe_inherits_the_quantized_reduction_of_the_base(recipe: str) -> None:
    base = Machine(EIGHT, {}, {"ROCM_QUICK_REDUCE_QUANTIZATION": "INT8"})
    started = render(load_recipe(recipe), machine=base)
    assert started.env["ROCM_QUICK_REDUCE_QUANTIZATION"] == "NONE"
    assert not any("40084" in note.found for note in started.notes if note.severity is Severity.WARN)
    inherited = resolve(load_recipe(recipe), [])
    env = {name: value for name, value in inherited.recipe.env.items() if value is not False}
    improve = {n: c for n, c in inherited.recipe.improve.items() if "QUICK_REDUCE" not in n}
    bare = replace(inherited, recipe=inherited.recipe.model_copy(update={"env": env, "improve": improve}))
    warned = "quick-reduce" in [fault.id for fault in bare.faults(base)]
    assert warned == (recipe in ("w4a8", "w4a16"))  # drafts turn the custom all-reduce off


def test_kv_in_host_memory_is_copied_directly() -> None:
    found = launch("agent", HOST_CACHE)
    assert found.args["hicache-io-backend"] == "direct" and found.args["hicache-mem-layout"] == "layer_first"
    assert any("1.59" in note.found for note in found.notes if note.severity is Severity.WARN)

"""An engine on the virtual node takes the arguments and variables of recipe `agent`, but for those that are listed."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from support.hip_branches import ROOTS, SAVED, SETTINGS, coverage
from support.repository import ROOT
from support.sglang_program import BOTH, VERSIONS
from support.virtual_servers import AGENT, LEFT_OUT, virtual_launch

NAMES = AGENT.args.keys() | {f"env.{name}" for name in AGENT.recipe.environment}


def test_each_exception_is_of_the_recipe_and_has_a_reason() -> None:
    assert LEFT_OUT.keys() - NAMES == set()
    assert all(LEFT_OUT.values())


@pytest.mark.parametrize("speculate", [True, False])
def test_the_engine_takes_everything_else_of_the_recipe(speculate: bool) -> None:
    """Compare what the recipe says now: an argument that it gains is taken, or listed with a reason."""
    launch = virtual_launch(speculate)
    taken = {**launch.args, **{f"env.{name}": value for name, value in launch.env.items()}}
    said = {**AGENT.args, **{f"env.{name}": value for name, value in AGENT.recipe.environment.items()}}
    drafting = {name for name in said if name.startswith("speculative-")}
    expected = {name: said[name] for name in NAMES - LEFT_OUT.keys() - (set() if speculate else drafting)}
    assert {name: str(taken.get(name)) for name in expected} == {name: str(value) for name, value in expected.items()}
    assert taken["enable-torch-compile"] is True
    assert not drafting & taken.keys() or speculate


@BOTH
def test_hips_lines_ran_or_are_out_of_reach_of_the_recipe(newest: bool) -> None:
    """The recipe decides the settings that put a line out of reach; the engine has all but those of LEFT_OUT."""
    release = VERSIONS[newest]
    found = Counter(coverage(json.loads(SAVED.read_text())[release], ROOTS[release]).values())
    ran, missed = found.pop("ran"), found.pop("missed", 0)
    assert ran / (ran + missed) >= 0.9
    assert found.keys() == SETTINGS.keys()
    row = f"| {release} | {ran} of {ran + missed} | {found.total()} |"
    assert row in (ROOT / "docs/virtual-node.md").read_text()
    assert AGENT.args["cuda-graph-max-bs-decode"] >= AGENT.args["max-running-requests"]  # a graph for each batch
    assert 64 // AGENT.args["tp-size"] == 8  # heads of a rank

"""An engine on the virtual node takes the arguments and variables of recipe `agent`, but for those that are listed."""

from __future__ import annotations

import pytest
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

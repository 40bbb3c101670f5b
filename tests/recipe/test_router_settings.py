"""The recipe's table `[router]` and what the router is started with."""

import dataclasses

import pytest

from kimi_w4a8_eagle3.recipe.launch import load_recipe, with_settings
from kimi_w4a8_eagle3.recipe.router_settings import RouterSettings


def test_every_argument_is_one_that_the_router_knows():
    from sglang_router.router_args import RouterArgs

    arguments = RouterSettings().resolved(prefix_cache=True).router_arguments()
    assert set(arguments) <= {field.name for field in dataclasses.fields(RouterArgs)}
    assert RouterArgs(**arguments).policy == "cache_aware"


@pytest.mark.parametrize(("prefix_cache", "threshold"), [(True, 16), (False, 1)])
def test_without_a_prefix_cache_the_load_decides(prefix_cache, threshold):
    assert RouterSettings().resolved(prefix_cache).router_arguments()["balance_abs_threshold"] == threshold


def test_what_an_operator_sets_stays():
    recipe = with_settings(load_recipe("tiny"), {"router.balance_abs_threshold": "7", "router.policy": "round_robin"})
    found = recipe.router.resolved(prefix_cache=False)
    assert (found.balance_abs_threshold, found.balance_rel_threshold, found.policy) == (7, 1.01, "round_robin")

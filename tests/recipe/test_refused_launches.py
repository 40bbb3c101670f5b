"""Launches that are refused before a start: settings, values of arguments, options that do not fit."""

from __future__ import annotations

import re

import pytest

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.machine.hardware import Machine, gpu_by_name
from kimi_w4a8_eagle3.recipe.launch import load_recipe, render

NO_GPU = Machine()
USAGE = [
    ("tp-size=1000", "--tp-size 1000 is not a valid value.*a whole number from 1 to 64"),
    ("tp-size=0", "--tp-size 0 is not"),
    ("tp-size=[1, 2]", "--tp-size 1 2 is not"),
    ("mem-fraction-static=1.2", "--mem-fraction-static 1.2 is not a valid value.*a number from 0.01 to 0.99"),
    ("max-total-tokens=-5", "--max-total-tokens -5 is not"),
    ("port=70000", "--port 70000 is not a valid value.*a whole number from 1 to 65535"),
    ("port=auto", "--port auto is not"),
    ("port=true", "--port has no value.*a whole number from 1"),
    ("watchdog-timeout=abc", "--watchdog-timeout abc is not a valid value.*a number >= 1"),
    ("watchdog-timeout=nan", "--watchdog-timeout nan is not"),
    ("attention-backend=foo", "--attention-backend foo is not a valid value.*aiter, triton"),
    ("tool-call-parser=zzz", "--tool-call-parser zzz is not a valid value.*kimi_k2"),
    ("numa-node=[0,0]", "--numa-node 0 0 has 2 of 8 GPUs.*one NUMA node for each GPU"),
    ("numa-node=0", "--numa-node 0 has 1 of 8 GPUs"),
    ('numa-node=["a"]', "--numa-node a is not"),
    ("host=", "--host has no value.*an address"),
    ("host=a b", "--host a b is not"),
    ("dist-init-addr=", "--dist-init-addr has no value"),
    ("enable-metrics=yes", "--enable-metrics yes is not a valid value.*true or false"),
    ("port", "cannot read the setting 'port'"),
    ("options.speculatio=x", "unknown key 'options.speculatio'; did you mean 'speculation'?"),
    ("hardwar.gpus=1", "unknown key 'hardwar'; did you mean 'hardware'?"),
    ("engine.x=1", "engine"),
    ("router.polcy=random", "did you mean 'policy'"),
    ("router.retry_max_retries=0", "greater than or equal to 1"),
]
FAULT = 'options.accept_faults=["mla-page"]'
MISFITS = [
    ("eagle3", [FAULT], "no known fault is called 'mla-page'; did you mean 'mla-pages'"),
    ("eagle3", ["tp-size=2"], "no room for the KV cache"),
]


@pytest.mark.parametrize(("setting", "message"), USAGE)
def test_a_setting_that_cannot_be_is_a_usage_error(setting: str, message: str) -> None:
    with pytest.raises(KimiError) as caught:
        render(load_recipe("eagle3"), [setting], machine=NO_GPU)
    assert re.search(message, str(caught.value), re.DOTALL) and caught.value.exit_code == 2


@pytest.mark.parametrize(("recipe", "settings", "message"), MISFITS)
def test_what_does_not_fit_together_is_refused(recipe: str, settings: list[str], message: str) -> None:
    with pytest.raises(KimiError, match=message):
        render(load_recipe(recipe), settings, machine=NO_GPU, gpu=gpu_by_name("mi300x"))


def test_a_numa_list_covers_the_gpus_of_every_engine() -> None:
    words = ["base-gpu-id=4", "numa-node=[0, 0, 0, 0]", "tp-size=4"]
    with pytest.raises(KimiError, match="has 4 of 8 GPUs"):
        render(load_recipe("eagle3"), words, machine=NO_GPU)
    with pytest.raises(KimiError, match="has 4 of 8 GPUs"):
        render(load_recipe("agent-2x4"), words[1:2], machine=NO_GPU)
    assert render(load_recipe("eagle3"), words[1:], machine=NO_GPU).args["numa-node"] == [0, 0, 0, 0]

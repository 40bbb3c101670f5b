"""Launches that are refused before a start: by this package's own rules, and by SGLang's parser."""

from __future__ import annotations

import json
import re

import pytest
from support.sglang_program import BOTH, found

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.machine.hardware import Machine, gpu_by_name
from kimi_w4a8_eagle3.recipe.launch import load_recipe, render, resolve, with_settings
from kimi_w4a8_laptop import tiny

NO_GPU = Machine()
USAGE = [
    ("tp-size=0", "--tp-size 0 is not a valid value.*a whole number from 1"),
    ("tp-size=[1, 2]", r"--tp-size \[1, 2\] is not"),
    ("mem-fraction-static=1.2", "--mem-fraction-static 1.2 is not a valid value.*a number between 0 and 1"),
    ("max-total-tokens=-5", "--max-total-tokens -5 is not"),
    ("port=70000", "--port 70000 is not a valid value.*a whole number from 1 to 65535"),
    ("port=true", "--port True is not"),
    ("numa-node=[0,0]", "--numa-node 0 0 has 2 of 8 GPUs.*one NUMA node for each GPU"),
    ("numa-node=0", "--numa-node 0 has 1 of 8 GPUs"),
    ("host=", "--host has no value"),
    ("host=true", "--host True is not a valid value.*an address or the name of a host"),
    *((f"host={host}", f"--host {re.escape(host)} is not a valid value")
      for host in ("a b", "10.0.0", "1.2.3.400", "[::1]", "a..b", "http://a", "a:80", "\u00e9", "x" * 64)),
    (
        "speculative-algorithm=EAGLE",
        "does not fit this draft, which is an EAGLE3 draft.*kimi-k2.5-eagle3.*EAGLE3",
    ),
    ("port", "cannot read the setting 'port'"),
    ("options.speculatio=x", "unknown key 'options.speculatio'; did you mean 'speculation'?"),
    ("hardwar.gpus=1", "unknown key 'hardwar'; did you mean 'hardware'?"),
    ("engine.x=1", "engine"),
]  # fmt: skip
HOSTS = ["0.0.0.0", "::", "fe80::1%eth0", "localhost", "node-7.example.org.", "_gateway", "4u.rack", "x" * 63]
MISFITS = [
    ("eagle3", 'options.accept_faults=["mla-page"]', "no known fault is called 'mla-page'; did you mean 'mla-pages'"),
    ("eagle3", "tp-size=2", "no room for the KV cache"),
    ("tiny", "speculative-algorithm=EAGLE", "which is an EAGLE3 draft"),  # by the config.json in its folder
    ("agent", "speculative-algorithm=NEXTN", "NEXTN does not fit this draft"),
]
PARSED = """
import contextlib, io, json, sys
from kimi_w4a8_eagle3.sglang_plugin.check_arguments import check

def said(words):
    with contextlib.redirect_stderr(io.StringIO()) as text:
        try:
            check(words)
        except SystemExit as end:
            assert end.code == 2
    return text.getvalue().strip()

print(json.dumps([said(["--model-path", "x", *words.split()]) for words in json.loads(sys.argv[1])]))
"""
REFUSED_BY_SGLANG = {
    "--attention-backend foo": "argument --attention-backend: invalid choice: 'foo'",
    "--tool-call-parser zzz": "argument --tool-call-parser: invalid choice: 'zzz'",
    "--watchdog-timeout abc": "argument --watchdog-timeout: invalid float value: 'abc'",
    "--numa-node a": "argument --numa-node: invalid int value: 'a'",
    "--port": "argument --port: expected one argument",
    "--enable-metrics yes": "no argument takes the value 'yes'",
    "--watchdog-timeot 1": "there is no argument --watchdog-timeot; did you mean '--watchdog-timeout'?",
    "--watchdog-timeout 60 --numa-node 0 0 1 1 --enable-metrics": "",
}


@pytest.mark.parametrize(("setting", "message"), USAGE)
def test_a_setting_that_cannot_be_is_a_usage_error(setting: str, message: str) -> None:
    with pytest.raises(KimiError) as caught:
        render(load_recipe("eagle3"), [setting], machine=NO_GPU)
    assert re.search(message, str(caught.value), re.DOTALL) and caught.value.exit_code == 2


def test_a_name_or_an_address_is_a_host() -> None:
    for host in HOSTS:
        assert render(load_recipe("eagle3"), [f"host={host}"], machine=NO_GPU).host == host


@pytest.mark.parametrize(("recipe", "setting", "message"), MISFITS)
def test_what_does_not_fit_together_is_refused(recipe: str, setting: str, message: str) -> None:
    with pytest.raises(KimiError, match=message):
        render(load_recipe(recipe), [setting], machine=NO_GPU, gpu=gpu_by_name("mi300x"))


@pytest.mark.parametrize("algorithm", ["EAGLE", "NEXTN"])
def test_a_draft_that_only_arguments_name_is_looked_at_before_a_load(algorithm: str) -> None:
    settings = [f"speculative-algorithm={algorithm}", f"speculative-draft-model-path={tiny.draft_path()}"]
    with pytest.raises(KimiError, match=f"{algorithm} does not fit this draft, which is an EAGLE3 draft"):
        render(load_recipe("w4a8"), settings, machine=NO_GPU)


@BOTH
def test_sglangs_own_parser_refuses_the_rest(newest: bool) -> None:
    answers = found(PARSED, newest, json.dumps(list(REFUSED_BY_SGLANG)))
    for (words, expected), answer in zip(REFUSED_BY_SGLANG.items(), answers, strict=True):
        assert answer.startswith(expected) and bool(answer) == bool(expected), (words, answer)


@pytest.mark.parametrize(
    ("recipe", "setting", "asked"),
    [
        ("agent", None, False),
        ("agent:plain", "options.memory_ceiling=0.8", False),
        ("agent", "port=1234", False),
        ("agent", "max-running-requests=64", False),  # the recipe's own value
        ("agent", "max-running-requests=65", True),
        ("tiny", "watchdog-timeout=60", True),
    ],
)
def test_sglangs_parser_is_asked_about_what_no_packaged_recipe_has(recipe: str, setting: str, asked: bool) -> None:
    assert resolve(load_recipe(recipe), [setting] if setting else []).untested == asked
    mine = with_settings(load_recipe(recipe), {}).model_copy(update={"name": "mine"})
    assert resolve(mine, [setting] if setting else []).untested


def test_a_numa_list_covers_the_gpus_before_the_engine() -> None:
    words = ["base-gpu-id=4", "numa-node=[0, 0, 0, 0]", "tp-size=4"]
    with pytest.raises(KimiError, match="has 4 of 8 GPUs"):
        render(load_recipe("eagle3"), words, machine=NO_GPU)
    assert render(load_recipe("eagle3"), words[1:], machine=NO_GPU).args["numa-node"] == [0, 0, 0, 0]

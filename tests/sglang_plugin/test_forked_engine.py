"""Hooks reach every module that holds what is hooked, found in one walk; the rest: tests/e2e/test_fork_server.py."""

import sys
from types import ModuleType

import pytest

from kimi_w4a8_eagle3.sglang_plugin.forked_engine import Holders


@pytest.fixture
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    def make(name: str, **held: object) -> ModuleType:
        made = ModuleType(name)
        vars(made).update(held)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    return make


def test_every_holder_but_the_source_gets_the_wrapped_one(module) -> None:
    first, second = (lambda: None), (lambda: None)
    source, other = module("source", own=first), module("other", renamed=first, again=first)
    holders = Holders()
    assert holders.replace(first, second, source) == 2
    assert source.own is first and other.renamed is other.again is second
    later = module("later", first=first)  # imported while hooks are applied
    assert holders.replace(first, second, source) == 1 and later.first is second
    assert holders.replace(first, second, source) == 0  # nobody holds it any more

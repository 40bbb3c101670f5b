"""Bodies that must not reach the engine, each with its refusal."""

from __future__ import annotations

import json

import pytest
from support.gateway_app import MODEL, App, ScriptedEngine
from support.hostile_bodies import REFUSED


@pytest.mark.parametrize("name", REFUSED)
def test_each_is_refused_with_a_reason(name: str) -> None:
    path, body, words = REFUSED[name]
    engine = ScriptedEngine()
    answer = App(engine).ask(path, {**body, "model": MODEL} if isinstance(body, dict) else body)
    assert 400 <= answer.status_code < 500, answer.text
    assert words in json.dumps(answer.json(), ensure_ascii=False).replace('\\"', '"'), answer.text
    assert engine.seen == []

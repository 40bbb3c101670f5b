"""Bodies that must not reach the engine, each with its refusal: of an earlier door in the engine's process."""

from __future__ import annotations

import json

import pytest
from support.gateway_app import MODEL, App, ScriptedEngine
from support.hostile_bodies import REFUSED

# Where the gateway counts before it reads, or reads with its own types, it says so in other words.
WORDS = {
    "long text": "8192 tokens",
    "many ids": "8193 tokens > 8192",
    "logprobs": "less than or equal to 128",
    "negative logprobs": "greater than or equal to 0",
    "streamed tokens": "stream: Input should be False",
    "media counted twice": "holds no other parts",
    "format is a list": "response_format: Input should be",
    "type of a tool": "type of a tool",
    "choice of a tool that is a text": "tool_choice names no function",
    "data: as a prompt": "exceed 8192 tokens",
    "long prompts together": "exceed 65536 tokens",
    "many empty objects": "has 200001 entries",
}
CASES = {
    name: (path, body, WORDS.get(name, words)) for name, (path, body, words) in REFUSED.items() if path != "/generate"
}


@pytest.mark.parametrize("name", CASES)
def test_each_is_refused_with_a_reason(name: str) -> None:
    path, body, words = CASES[name]
    engine = ScriptedEngine()
    answer = App(engine).ask(path, {**body, "model": MODEL} if isinstance(body, dict) else body)
    assert 400 <= answer.status_code < 500, answer.text
    assert words in json.dumps(answer.json(), ensure_ascii=False).replace('\\"', '"'), answer.text
    assert engine.seen == []

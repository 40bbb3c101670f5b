"""Collected requests: the tokens of finished answers, for each key by itself, where the operator has consented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.gateway_app import MODEL, App, ScriptedEngine, renderer
from support.pictures import noise, showing
from support.waiting import until

from kimi_w4a8_eagle3.base import collection
from kimi_w4a8_eagle3.base.collection import NO_KEY, REQUESTS, Consent, key_name
from kimi_w4a8_eagle3.gateway.collect import Collecting
from kimi_w4a8_lab.draft.collected import read_collected, read_requests

QUESTION = {"role": "user", "content": "What is 33 + 14?"}
SAID = "I add.</think>It is 47."


@pytest.mark.parametrize("keyed", [False, True])
def test_finished_answers_are_stored_as_the_engine_drew_them(
    keyed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collection, "_EVERY_S", 0.01)
    (folder := tmp_path / "collected").mkdir(mode=0o700)
    Consent(share=1.0).write(folder)
    (file := tmp_path / "keys").touch(0o600)
    file.write_text("ann key-of-ann-123\n")
    app = App(ScriptedEngine(SAID), keys=file if keyed else None)
    app.service._collecting = Collecting(folder, renderer(), 640)
    headers = {"authorization": "Bearer key-of-ann-123"} if keyed else {}
    answers = set[str]()
    for more in ({}, {"stream": True}, {"response_format": {"type": "json_object"}}):
        body = {"model": MODEL, "messages": [QUESTION], "max_tokens": 64, **more}
        answer = app.ask("/v1/chat/completions", body, **headers)
        assert answer.status_code == 200
        answers |= {re.findall(r'"id": ?"(chatcmpl-\w+)"', answer.text)[0]}
    shown = {"model": MODEL, "messages": [showing(noise(8, 8), "?")]}  # pictures are no ids
    assert app.ask("/v1/chat/completions", shown, **headers).status_code == 200
    key = key_name("key-of-ann-123") if keyed else NO_KEY

    def stored() -> set[str]:
        return {one.id for file in (folder / REQUESTS).glob("*/[!.]*") for one in read_requests(file)}

    until(lambda: stored() == answers)  # by these ids `draft erase --request` finds them
    assert {one.kind for one in read_collected(folder, 1000)} == {key, f"{key}-structured"}
    assert [path.name for path in (folder / REQUESTS).iterdir()] == [key]
    prompt, said = app.engine.seen[0]["input_ids"], renderer().encode(SAID, special=True)
    found = read_collected(folder, 1000)
    assert all(one.tokens[: len(prompt)] == tuple(prompt) for one in found)
    assert {renderer().decode(list(one.tokens[len(prompt) :])) for one in found} == {renderer().decode(said)}

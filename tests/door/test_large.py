"""A body that takes long to read is refused by a worker; so is one that breaks a rule."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import nullcontext
from contextvars import Context
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from support.door_app import ANYTHING, CHAT, CLOSED, Engine, ask, guarded, message
from support.pictures import picture

from kimi_w4a8_eagle3.door import fields, large, middleware
from kimi_w4a8_eagle3.door import rules as door_rules
from kimi_w4a8_eagle3.door.access import CHECKED
from kimi_w4a8_eagle3.door.admission import Admission
from kimi_w4a8_eagle3.door.answers import Refusal
from kimi_w4a8_eagle3.door.large import THREAD_BYTES, WORKER_BYTES, large_request, measure, reading_job
from kimi_w4a8_eagle3.door.rules import RequestRules
from kimi_w4a8_eagle3.door.shares import Shares

RULES = RequestRules(CLOSED, dict.fromkeys(CHECKED, ANYTHING), ANYTHING, context=2**20)
PATH = "/v1/chat/completions"


LIMITS = {**CHAT, "logit_bias": {"long": [0] * 4096, "deep": json.loads("[" * 46 + "]" * 46)}}


def parts(messages: int, number: int, text: str = "x") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": text}] * number}] * messages}


def sent(path: str, body: str) -> bytes:
    return f"{path}\n{body}".encode()


@pytest.mark.parametrize("body", [CHAT, LIMITS, parts(100, 10), parts(1, 1, "x" * 2**20)])
def test_ordinary_bodies_are_read(body: dict[str, Any]) -> None:
    measure(RULES, None, sent(PATH, json.dumps(body)))


@pytest.mark.parametrize("kept", [True, False])
def test_a_body_of_many_small_parts_is_refused(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "_READ_S", 0.002)
    body = parts(100, 100) if kept else {**CHAT, "no_such_field": [[[]] * 4000] * 20}
    with pytest.raises(Refusal, match=r"reading this body takes \d+ ms of CPU time, and 2 ms are allowed"):
        measure(RULES, None, sent(PATH, json.dumps(body)))


def test_a_request_is_small_until_the_door_says_so_and_the_worker_counts_nothing() -> None:
    assert Context().run(large_request.get) is None
    prepared = reading_job(replace(RULES, counted=True), None).prepare()
    assert isinstance(prepared, partial) and prepared.args[0].counted is False


@pytest.mark.parametrize("image", [None, picture(b"x" * 3000)])
def test_a_body_may_take_its_time_and_more_for_the_characters_of_pictures(
    image: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [{"type": "image_url", "image_url": {"url": image}}] if image else [{"type": "text", "text": "x"}]
    body = json.dumps({**CHAT, "messages": [{"role": "user", "content": parts}]})
    monkeypatch.setattr(large, "_READ_S", 1.0)
    monkeypatch.setattr(large, "_PICTURE_S", 2.0**-10)
    most_s = 1.0 + len(image or "") / 1024
    for seconds, expectation in ((most_s, nullcontext()), (most_s + 0.0005, pytest.raises(Refusal))):
        clock = iter([5.0, 5.0 + seconds])
        monkeypatch.setattr(large.time, "process_time", lambda clock=clock: next(clock))
        with expectation:
            measure(RULES, None, sent(PATH, body))


def _shown(endpoint: str, url: str, text: str) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    openai = {"type": "image_url", "image_url": {"url": url}}
    parts = [openai if endpoint == PATH else {"type": "image", "source": source}, {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": parts}]}


@pytest.mark.parametrize("endpoint", [PATH, "/v1/messages", "/v1/completions"])
def test_long_texts_are_counted_in_tokens_without_their_pictures(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large, "COUNTED_CHARACTERS", 2000)
    monkeypatch.setattr(large, "_PIECE", 100)
    rules, image = replace(RULES, context=500), picture(b"x" * 3000)
    for words, pieces in ((900, 0), (1000, 0), (1001, 21), (9000, 11)):
        text = "x" * (2 * words) if words < 9000 else "w " * 1500  # 500 tokens are five in each of 100 pieces
        asked: list[str] = []

        def encode(text: str, asked: list[str] = asked) -> list[str]:
            asked.append(text)
            return text.split()

        if endpoint == "/v1/completions":
            body: dict[str, Any] = {"prompt": text}
        elif words == 1000:
            continue  # names and types of parts count, too
        else:
            body = _shown(endpoint, image, text)
        with pytest.raises(Refusal, match="is longer than 500 tokens") if words == 9000 else nullcontext():
            measure(rules, encode, sent(endpoint, json.dumps(body)))
        assert len([piece for piece in asked if piece[:1] in ("x", "w") and len(piece) > 1]) == pieces
        assert max(map(len, asked), default=0) == (100 if pieces else 0)
        assert not [piece for piece in asked if len(piece) > 50 and piece in image]
        assert pieces != 21 or text in "".join(asked)


def test_a_list_of_prompts_is_not_counted_and_nothing_is_without_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "COUNTED_CHARACTERS", 2000)
    rules, prompt = replace(RULES, context=500), "w " * 1200
    measure(rules, None, sent("/v1/completions", json.dumps({"prompt": prompt})))
    measure(rules, str.split, sent("/v1/completions", json.dumps({"prompt": [prompt] * 2})))
    for words in (505, 506):  # pieces may have more tokens than the whole, so a hundredth more are let through
        with pytest.raises(Refusal, match="is longer than 500 tokens") if words > 505 else nullcontext():
            measure(rules, str.split, sent("/v1/completions", json.dumps({"prompt": ["word " * words]})))


def test_what_is_wrong_with_a_large_body_is_said_by_the_worker() -> None:
    deep, long = f'{{"stop": {"[" * 48}{"]" * 48}}}', json.dumps({"stop": [0] * 4097})
    for body, why in (("{bad", "JSON"), ('{"guided_json": "{}"}', "guided_json"), (deep, "nests"), (long, "4097")):
        with pytest.raises(Refusal, match=why):
            measure(RULES, None, sent(PATH, body))


def test_a_large_body_is_measured_read_in_a_thread_and_its_dropped_fields_are_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dropped, typed, check = list[str](), list[bytes](), door_rules._check_types
    monkeypatch.setattr(large, "_READ_S", 0.05)
    monkeypatch.setattr(door_rules, "_check_types", lambda *of: typed.append(of[1]) or check(*of))
    monkeypatch.setattr(fields.Fields, "drop", lambda self, name, where: dropped.append(name) if self.counted else None)
    engine, seen = Engine(), []
    admission = Admission({"reading": reading_job(RULES, str.split)}, Shares(2**29))
    door = guarded(engine, CLOSED, admission=admission)
    monkeypatch.setattr(door, "_rules", RULES)
    monkeypatch.setattr(middleware, "_with_length", lambda headers, _: seen.append(large_request.get()) or headers)
    text = "x" * WORKER_BYTES

    def post(body: dict[str, Any]) -> Any:
        return ask(door, "POST", PATH, json={**CHAT, **body})

    try:
        assert post({}).status_code == 200
        assert post({"user": "x" * 1000, "no_such_field": text[: THREAD_BYTES + 1]}).status_code == 200
        whole = post({"messages": [{"role": "user", "content": text}], "no_such_field": 1})
        assert whole.status_code == 200 and engine.seen[-1]["messages"][0]["content"] == text
        refused = post(parts(1000, 60))
        assert refused.status_code == 400 and "send fewer messages, parts or tools" in message(refused)
        wrong = post({"guided_json": text})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "guided_json"
    finally:
        os.kill(admission.pid, signal.SIGKILL)
    assert [places is not None for places in seen] == [False, True, True] and len(engine.seen) == 3
    assert dropped == ["no_such_field"] * 2 and max(map(len, typed)) < WORKER_BYTES, "the worker checks the large ones"
    assert sys.getswitchinterval() < 0.001, "the event loop waits for the threads"
    assert large._threads.submit(os.nice, 0).result() == os.nice(0) + large.NICE, "the event loop waits for a core"

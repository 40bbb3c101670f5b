"""The door's own answers: their form, their headers, and what they take out of the engine's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from support.door_app import posted

from kimi_w4a8_eagle3.door.answers import Refusal, Send, answer, only, with_clients_faults

LENGTH, KIND = (b"content-length", b"999"), (b"content-type", b"application/json")


def refused(status: int, path: str = "/v1/chat/completions", **scope: Any) -> tuple[dict[bytes, bytes], Any]:
    sent: list[Any] = []
    refusal = Refusal("why", status, "field")
    asyncio.run(answer({**posted(path), **scope}, _into(sent), refusal))
    assert sent[0]["status"] == status
    headers = dict(sent[0]["headers"])
    assert headers.pop(b"content-length") == b"%d" % len(sent[1]["body"])
    assert headers.pop(b"content-type") == b"application/json"
    return headers, json.loads(sent[1]["body"])


def _into(sent: list[Any]) -> Send:
    async def send(message: Any) -> None:
        sent.append(message)

    return send


@pytest.mark.parametrize(
    ("status", "kind", "headers"),
    [
        (400, "invalid_request_error", {}),
        (401, "authentication_error", {b"www-authenticate": b"Bearer"}),
        (403, "permission_error", {}),
        (404, "invalid_request_error", {}),
        (408, "invalid_request_error", {b"connection": b"close"}),
        (413, "request_too_large", {b"connection": b"close"}),
        (429, "rate_limit_error", {b"retry-after": b"1"}),
        (503, "overloaded_error", {b"connection": b"close"}),
    ],
)
def test_each_status_has_its_name_and_headers(status: int, kind: str, headers: dict[bytes, bytes]) -> None:
    found, body = refused(status)
    assert (found, body["error"]["type"], body["error"]["message"]) == (headers, kind, "why")


def test_the_form_is_the_one_of_the_api() -> None:
    openai = {"message": "why", "type": "overloaded_error", "param": "field", "code": "service_unavailable"}
    anthropic = {"type": "error", "error": {"message": "why", "type": "overloaded_error"}}
    assert refused(503)[1] == {"error": openai}
    assert refused(503, "/v1/messages")[1] == anthropic
    assert refused(503, "/api/v1/messages", root_path="/api")[1] == anthropic
    assert refused(503, "/v1/messages", root_path="/api")[1] == anthropic
    assert refused(503, "/api/v1/messages")[1] == {"error": openai}


def through(wrapped: Send, status: int, *parts: bytes) -> None:
    async def send() -> None:
        await wrapped({"type": "http.response.start", "status": status, "headers": [LENGTH, KIND]})
        for number, part in enumerate(parts, 1):
            await wrapped({"type": "http.response.body", "body": part, "more_body": number < len(parts)})

    asyncio.run(send())


@pytest.mark.parametrize(
    ("status", "parts", "expected"),
    [
        (200, [b'{"a": 1, ', b'"b": 2}'], b'{"a": 1}'),
        (200, [b"[1]"], b"{}"),
        (200, [b"not JSON"], b"{}"),
        (404, [b'{"b": ', b"2}"], b'{"b": 2}'),
    ],
)
def test_only_the_named_members_pass(status: int, parts: list[bytes], expected: bytes) -> None:
    sent: list[Any] = []
    through(only(("a", "c"), _into(sent)), status, *parts)
    length = LENGTH if status != 200 else (b"content-length", b"%d" % len(expected))
    assert (sent[0]["status"], sorted(sent[0]["headers"])) == (status, sorted([length, KIND]))
    assert [message["body"] for message in sent[1:]] == [expected]


def test_a_grammar_that_no_token_follows_is_the_clients_fault() -> None:
    """A 500 is read whole before a part of it is sent; every other answer passes part by part."""
    for status, parts in ((200, [b"a", b"Grammar accept_token failed"]), (500, [b"a", b"b"])):
        sent: list[Any] = []
        through(with_clients_faults(posted("/v1/completions"), _into(sent)), status, *parts)
        assert [message.get("status", message.get("body")) for message in sent] == [status, *parts]
    sent = []
    through(with_clients_faults(posted("/v1/completions"), _into(sent)), 500, b"Grammar accept", b"_token failed")
    assert [message.get("status") for message in sent] == [400, None]
    assert b"no token of this model can follow" in sent[1]["body"]


def test_a_prompt_without_room_has_the_code_that_clients_know() -> None:
    said = b'{"object": "error", "message": "prompt is too long: 9 tokens > 8 maximum", "code": 400}'
    for path, form in (("/v1/chat/completions", "context_length_exceeded"), ("/v1/messages", "invalid_request_error")):
        sent: list[Any] = []
        through(with_clients_faults(posted(path), _into(sent)), 400, said[:40], said[40:])
        error = json.loads(sent[1]["body"])["error"]
        assert (sent[0]["status"], error["message"]) == (400, "prompt is too long: 9 tokens > 8 maximum")
        assert form in (error.get("code"), error["type"])
    sent = []
    through(with_clients_faults(posted("/v1/completions"), _into(sent)), 400, b"a", b"b")
    assert [message.get("status", message.get("body")) for message in sent] == [400, b"a", b"b"]

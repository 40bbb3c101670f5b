"""The door's own answers: their form, and their headers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from support.door_app import posted

from kimi_w4a8_eagle3.door.answers import Refusal, Send, answer, with_vendors_errors

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


def test_a_grammar_that_no_token_follows_is_the_clients_fault() -> None:
    sent: list[Any] = []
    through(with_vendors_errors(posted("/v1/completions"), _into(sent)), 200, b"a", b"Grammar accept_token failed")
    assert [message.get("body") for message in sent] == [None, b"a", b"Grammar accept_token failed"]
    sent = []
    through(with_vendors_errors(posted("/v1/completions"), _into(sent)), 500, b"Grammar accept", b"_token failed")
    assert [message.get("status") for message in sent] == [400, None]
    assert b"no token of this model can follow" in sent[1]["body"]


def test_an_error_in_a_stream_has_the_vendors_code() -> None:
    sent: list[Any] = []
    error = {"object": "error", "message": "why", "type": "BadRequestError", "param": None, "code": 400}
    parts = [b'data: {"id": "1"}\n\n', b"data: %b\n\n" % json.dumps({"error": error}).encode(), b"data: [DONE]\n\n"]
    through(with_vendors_errors(posted("/v1/chat/completions"), _into(sent)), 200, *parts)
    assert (sent[1]["body"], sent[3]["body"]) == (parts[0], parts[2])
    assert json.loads(sent[2]["body"].removeprefix(b"data: ")) == {
        "error": {"message": "why", "type": "invalid_request_error", "param": None, "code": "bad_request"}
    }


@pytest.mark.parametrize(
    ("status", "body", "message", "openai", "anthropic"),
    [
        (400, {"object": "error", "message": "why", "type": "BadRequestError", "param": None, "code": 400},
         "why", ("invalid_request_error", "bad_request"), "invalid_request_error"),
        (404, {"object": "error", "message": "why", "type": "NotFoundError", "param": "model", "code": 404},
         "why", ("invalid_request_error", "model_not_found"), "not_found_error"),
        (404, {"detail": "Not Found"}, "Not Found", ("invalid_request_error", "not_found"), "not_found_error"),
        (500, {"type": "error", "error": {"type": "api_error", "message": "Internal server error"}},
         "Internal server error", ("server_error", "internal_server_error"), "api_error"),
        (500, b"Internal Server Error",
         "Internal Server Error", ("server_error", "internal_server_error"), "api_error"),
        (499, {"message": None}, '{"message": null}', ("invalid_request_error", "error"), "invalid_request_error"),
    ],
)  # fmt: skip
def test_an_error_of_sglang_gets_the_vendors_form(
    status: int, body: Any, message: str, openai: tuple[str, str], anthropic: str
) -> None:
    said = body if isinstance(body, bytes) else json.dumps(body).encode()
    for path in ("/v1/chat/completions", "/v1/messages"):
        sent: list[Any] = []
        through(with_vendors_errors(posted(path), _into(sent)), status, said[:5], said[5:])
        got = json.loads(sent[1]["body"])
        error = got["error"]
        assert (sent[0]["status"], error["message"]) == (status, message)
        if path == "/v1/messages":
            assert got == {"type": "error", "error": {"type": anthropic, "message": message}}
        else:
            assert (error["type"], error["code"]) == openai and error.keys() == {"message", "type", "param", "code"}

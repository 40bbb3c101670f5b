"""Requests that the plugin converts and tokenizes in threads, against the same ones in the event loop."""

from __future__ import annotations

import re
from typing import Any

import httpx

MODEL = "kimi-k2.5-tiny"
_QUESTION = [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many apples?"}]
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
_CHAT = {"model": MODEL, "messages": _QUESTION, "max_tokens": 1, "temperature": 0}
_REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **_CHAT,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}],
    },
    "/v1/completions": {"model": MODEL, "prompt": "Tom has", "max_tokens": 1, "temperature": 0},
    "/v1/messages": _CHAT,
    "/v1/messages/count_tokens": {"model": MODEL, "messages": _QUESTION},
    "/v1/responses": {"model": MODEL, "input": _QUESTION, "max_output_tokens": 1, "temperature": 0},
    "/v1/tokenize": {"model": MODEL, "prompt": "Tom"},
    "/generate": {"text": "Tom has", "sampling_params": {"max_new_tokens": 1, "temperature": 0}},
}
# Of an answer: ids, times, and what is computed of times.
_VARYING = r'"(id|\w*_id)":\s?"[^"]+"|\d+(\.\d+)?e-?\d+|\d+\.\d+|\d{9,}'


def check_large_requests(url: str) -> None:
    """Send each request twice small, so that a prefix cache holds it, and then large by a field that is dropped.

    An answer has one token: how many tokens a part of a longer stream has depends on time.
    """
    for path, body in _REQUESTS.items():
        for streamed in ({}, {"stream": True}) if "max" in str(body) else ({},):
            said = []
            for more in ({}, {}, {"no_such_field": "x" * 10_000}):
                answer = httpx.post(url + path, json={**body, **streamed, **more}, timeout=60)
                assert answer.status_code == 200, answer.text[:300]
                said.append(f"{path}: " + re.sub(_VARYING, "", answer.text))
            assert said[1] == said[2]

"""Requests that a server refuses, by HTTP, JSON, and the types and ranges of the vendors' fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from .forms import ABSENT, APIS, COUNT, Case, asking, one, refused
from .replies import CHAT, MESSAGES, RESPONSES, TEXT, Reply


def http() -> Iterator[Case]:
    raw = {"no JSON": b"{bad", "nothing": b"", "a list": b"[1]", "a text": b'"x"', "no UTF-8": b'{"model": "\xff"}',
           "UTF-16": '{"model": "m"}'.encode("utf-16"), "NaN": b'{"temperature": NaN}',
           "deep": b'{"metadata": ' + b"[" * 2000 + b"]" * 2000 + b"}"}  # fmt: skip
    for name, path in APIS.items():
        yield from (refused("http", f"body is {what}", path, body) for what, body in raw.items())
        yield refused("http", "another method", path, None, 404, 405, method="GET")
        yield refused("http", "a path below", f"{path}/none", {}, 404, 405)
        yield refused("http", "a model that is not here", path, asking(path, model="no-such-model"), 404)
        yield refused("http", "no model", path, asking(path, model=ABSENT))
        header = "request-id" if name == "messages" else "x-request-id"
        yield one("http", "an id of the request", path, asking(path), partial(_has, header=header))
    yield refused("http", "a path that is not here", "/v1/none", None, 404, method="GET")
    yield one("http", "list of models", "/v1/models", None, _is_model_list, method="GET")
    yield refused("http", "a model that is not here", "/v1/models/no-such-model", None, 404, method="GET")


def _has(reply: Reply, header: str) -> None:
    assert reply.status == 200 and reply.headers.get(header), f"no header {header}"


def _is_model_list(reply: Reply) -> None:
    found = reply.json
    assert found["object"] == "list" and found["data"], found
    assert {"id", "object", "created", "owned_by"} <= set(found["data"][0]) and found["data"][0]["object"] == "model"


# Values that a field's type or range excludes.
Wrong = dict[str, list[Any]]
_COMMON: Wrong = {"temperature": ["hot", -0.1, 2.1, [1]], "top_p": ["x", -0.1, 1.1], "stream": ["yes", 1.5]}
_OPENAI: Wrong = {"parallel_tool_calls": ["no"], "top_logprobs": [-1, "2"], "tool_choice": ["maybe", 5]}
_COMPLETING: Wrong = {
    "n": [0, "2", 1.5, -1], "presence_penalty": [2.1, -2.1, "x"], "frequency_penalty": [3, -3], "seed": ["x", 1.5],
    "logit_bias": [{"5": 101}, [1], {"5": "x"}], "stop": [5, [5], {"a": 1}],
}  # fmt: skip
_WRONG: dict[str, Wrong] = {
    CHAT: {
        **_COMMON, **_OPENAI, **_COMPLETING, "max_completion_tokens": [0, -1, "9", 1.5], "max_tokens": [0, "9"],
        "logprobs": ["yes", 2], "tools": ["f", [{}], [{"type": "function"}], [{"type": "function", "function": {}}]],
        "response_format": ["json", {"type": "x"}, {"type": "json_schema"}], "stream_options": ["x"],
        "messages": [ABSENT, "hi", [], [{}], [{"role": "x", "content": "hi"}], [{"role": "user"}], [5],
                     [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"type": "x"}]}],
                     [{"role": "user", "content": 5}],
                     [{"role": "user", "content": "?"}, {"role": "tool", "tool_call_id": "c", "content": "1"}]],
    },
    RESPONSES: {
        **_COMMON, **_OPENAI, "max_output_tokens": [0, -1, "9", 1.5], "metadata": [{"a": 1}, "x"], "tools": ["f", [5]],
        "text": ["x", {"format": {"type": "x"}}, {"format": {"type": "json_schema"}}], "instructions": [5],
        "input": [ABSENT, 5, [], [{}], [{"role": "x", "content": "hi"}], [{"type": "item_reference", "id": "msg_1"}],
                  [{"role": "user", "content": "?"}, {"type": "function_call_output", "call_id": "c", "output": "1"}],
                  [{"role": "user", "content": [{"type": "x"}]}]],
        "previous_response_id": ["resp_none"], "conversation": ["conv_none"], "include": ["x"],
    },
    MESSAGES: {
        **_COMMON, "max_tokens": [ABSENT, -1, "9", 1.5], "top_k": ["x", 1.5], "stop_sequences": ["x", [5]],
        "system": [5, [5]], "tools": ["f", [{}], [{"name": "f", "input_schema": "x"}]],
        "tool_choice": ["auto", {"type": "x"}, {"type": "any"}, {"type": "tool", "name": "none"}],
        "thinking": ["on"], "output_config": ["x", {"format": {"type": "x"}}],
        "messages": [ABSENT, "hi", [], [{}], [{"role": "x", "content": "hi"}], [5],
                     [{"role": "user", "content": [{"type": "x"}]}], [{"role": "user", "content": [{"type": "text"}]}],
                     [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "1"}]}]],
    },
    TEXT: {**_COMMON, **_COMPLETING, "prompt": [ABSENT, [], {}, [1, "x"]], "logprobs": [-1, "x"], "echo": ["x"],
           "max_tokens": [-1, "9"]},
    COUNT: {"messages": [ABSENT, [], "hi"], "system": [5], "tools": ["f"]},
}  # fmt: skip


def types() -> Iterator[Case]:
    for path, wrong in _WRONG.items():
        base = asking(path if path != COUNT else MESSAGES)
        for name, value in ((name, value) for name, values in wrong.items() for value in values):
            shown = "left out" if value is ABSENT else json.dumps(value)[:70]
            needed = {"logprobs": True} if name == "top_logprobs" and path == CHAT else {}
            yield refused("types", f"{path[4:]} {name}: {shown}", path, {**base, **needed, name: value})
    yield refused("types", "top_logprobs without logprobs", CHAT, asking(CHAT, top_logprobs=2))


def keys() -> Iterator[Case]:
    for path in APIS.values():
        for name, header in {"no key": {}, "another key": {"authorization": "Bearer no-such-key"}}.items():
            yield refused("keys", name, path, asking(path), 401, headers={"authorization": "", **header})

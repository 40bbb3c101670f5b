"""Fields and turns of other vendors' clients: the prompt, or the refusal; and every parameter of their APIs.

The vendors' own models, openai's and anthropic's in two versions, read each answer, event and error.
"""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import pytest
from anthropic.types import ErrorResponse, Message, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.shared import ErrorObject
from pydantic import TypeAdapter
from support import vendor_parameters
from support.gateway_app import MODEL, App, ScriptedEngine, renderer

from kimi_w4a8_eagle3.gateway.requests import HARMLESS, REFUSED

C, R, M = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "?"}
SHORT = {"role": "developer", "content": "Be short."}
DONE = [{"role": "assistant", "content": "ok"}, USER]
PDF = {"type": "base64", "media_type": "application/pdf", "data": "aGVsbG8="}
FILE = {"filename": "a.pdf", "file_data": "data:application/pdf;base64,aGVsbG8="}
PLAIN = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "hello"}}
USED: list[Any] = [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}]
Case = tuple[str, Any, dict[str, Any], str]


def said(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def result(content: Any, failed: bool = True) -> dict[str, Any]:
    return said({"type": "tool_result", "tool_use_id": "t", "content": content, "is_error": failed})


def line(name: str) -> str:
    return f"[{name}: this server cannot read it]"


def schema(value: Any, strict: bool = False, **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": value, "b": {}}, "required": ["a"], **more}
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}]}


# Endpoint, turns, other fields, and a text of the prompt; with its status before it a text of the refusal.
CASES: dict[str, Case] = {
    "document": (M, [said({"type": "document", "source": PDF, "title": "a.pdf"}), *DONE], {}, line("document a.pdf")),
    "document, asked": (M, [said({"type": "document", "source": PDF})], {}, "400 'document' is not supported"),
    "document of text": (M, [said(PLAIN)], {}, "user<|im_middle|>hello\n"),
    "document of a tool": (M, [*USED, result([{"type": "document", "source": PDF}], False)], {}, line("document")),
    "file": (C, [said({"type": "file", "file": FILE}), *DONE], {}, line("file a.pdf")),
    "input_file": (R, [said({"type": "input_file", **FILE}), *DONE], {}, line("input_file a.pdf")),
    "input_file, asked": (R, [said({"type": "input_file", **FILE})], {}, "400 'input_file' is not supported"),
    "web_search_call": (R, [USER, {"type": "web_search_call"}, *DONE], {}, line("web_search_call") + "\n\nok"),
    "local_shell_call": (R, [USER, {"type": "local_shell_call", "call_id": "c"}, *DONE], {}, line("local_shell_call")),
    "server_tool_use": (M, [USER, said({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                                       role="assistant"), USER], {}, line("server_tool_use web_search")),
    "redacted_thinking": (M, [USER, said({"type": "redacted_thinking", "data": "x"}, *USED[1]["content"],
                                         role="assistant"), result("1")], {}, f"<think>{line('redacted_thinking')}</"),
    "is_error": (M, [*USED, result("nope")], {}, "\nError: nope<"),
    "is_error, said": (M, [*USED, result("<tool_use_error>no")], {}, "\n<tool_use_error>no<"),
    "developer": (C, [SHORT, USER], {}, "<|im_system|>system<|im_middle|>Be short.<"),
    "developer, later": (R, [USER, *DONE, SHORT, USER], {}, "?<|im_end|><|im_system|>system<|im_middle|>Be short.<"),
    "prefill": (M, [USER, {"role": "assistant", "content": "I"}], {}, "400 does not support assistant message prefill"),
    "last answer": (C, [USER, DONE[0]], {}, "assistant<|im_middle|><think></think>ok<|im_end|><|im_assistant|>"),
    "continued": (C, [USER, DONE[0]], {"continue_final_message": True, "thinking": {"type": "disabled"}}, "</think>ok"),
    "continued in thinking": (C, [USER, DONE[0]], {"continue_final_message": True}, "400 needs thinking off"),
    "allowed_tools": (R, [USER], {"tool_choice": {"type": "allowed_tools"}}, "400 send only these tools"),
    "memory": (M, [USER], {"tools": [{"type": "memory_20250818", "name": "memory"}]}, "<|im_user|>user<|im_middle|>?"),
    "store": (R, [USER], {"store": True}, "user<|im_middle|>?<"),  # the API's default, which smg writes out
    "a stored response": (R, [USER], {"previous_response_id": "resp_1"}, "400 the whole conversation"),
    "a stored item": (R, [USER, {"type": "item_reference", "id": "rs_1"}, USER], {}, "400 {store: false}"),
    "seed": (M, [USER], {"seed": 3}, "400 /v1/messages has no field 'seed'"),
    **{f"another model, {path}": (path, [USER], {"model": "gpt"}, "404 The model 'gpt' does not exist")
       for path in (C, R, M)},
    "an adapter": (M, [USER], {"model": "kimi-k2.5-tiny:a"}, "user<|im_middle|>?<"),
    "\\p{L}": (C, [USER], schema({"type": "string", "pattern": "^\\p{L}+$"}), "tool_declare"),
    "emoji": (C, [USER], schema({"pattern": "^(\\p{Extended_Pictographic}|\\p{Emoji_Component})+$"}), "tool_declare"),
    "tuple": (C, [USER], schema({"items": [{"type": "string"}], "additionalItems": False}), "tool_declare"),
    "limit of draft-04": (C, [USER], schema({"minimum": 0, "exclusiveMinimum": True}), "tool_declare"),
    "type any": (C, [USER], schema({"type": "any"}), "tool_declare"),
    "no type": (C, [USER], schema({"type": "objekt"}), "400 'objekt' is not valid"),
    "strict": (C, [USER], schema({}, True, dependencies={"a": ["b"]}), "400 dependencies would be ignored"),
}  # fmt: skip
SHAPES = {C: ChatCompletion, R: Response, M: Message}
EVENTS = {C: ChatCompletionChunk, R: ResponseStreamEvent, M: RawMessageStreamEvent}


def body_of(path: str, turns: Any, more: dict[str, Any]) -> dict[str, Any]:
    limit = {} if path == R else {"max_tokens": 8}
    return {"model": MODEL, "input" if path == R else "messages": turns, **limit, **more}


def read(kind: Any, text: str) -> None:
    TypeAdapter(kind).validate_json(text, strict=True)  # other fields are allowed


@pytest.mark.parametrize("name", CASES)
def test_each_is_right_or_refused_and_never_silent(name: str) -> None:
    path, turns, more, expected = CASES[name]
    engine = ScriptedEngine()
    answer = App(engine).ask(path, body_of(path, turns, more))
    status, _, words = expected.partition(" ") if expected[:1] == "4" else ("200", "", expected)
    assert answer.status_code == int(status), answer.text
    if status == "200":
        read(SHAPES[path], answer.text)
        assert words in renderer().decode(engine.seen[0]["input_ids"])
        return
    read(ErrorResponse if path == M else ErrorObject, answer.text if path == M else json.dumps(answer.json()["error"]))
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", EVENTS)
def test_the_vendors_types_read_every_event(path: str) -> None:
    usage = {"stream_options": {"include_usage": True}} if path == C else {}
    answer = App(ScriptedEngine()).ask(path, body_of(path, [USER], {"stream": True, **usage}))
    events = [line[6:] for line in answer.text.splitlines() if line[:7] == "data: {" and '"ping"' not in line]
    assert len(events) > 2
    for text in events:
        read(EVENTS[path], text)


PATHS = {
    "chat.completions": C, "responses": R, "completions": "/v1/completions", "messages": M, "beta.messages": M,
    "messages.count_tokens": f"{M}/count_tokens", "beta.messages.count_tokens": f"{M}/count_tokens",
}  # fmt: skip
SCHEMA = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "json_schema": {"schema": {}}}
FUNCTION = {"type": "function", "name": "f", "function": {"name": "f"}}
# A value of each parameter that is no default, and what must stand beside it to count.
VALUES: dict[str, Any] = {
    "audio": {"voice": "a", "format": "wav"}, "background": True, "background_options": {"a": 1}, "best_of": 2,
    "betas": ["x"], "billing_policy": {"a": 1}, "cache_control": {"type": "ephemeral"}, "compaction": {"a": 1},
    "container": "c", "context_management": {"edits": []}, "conversation": "c", "diagnostics": {"a": 1}, "echo": True,
    "fallback_credit_token": "t", "fallbacks": [{"model": "m"}], "frequency_penalty": 0.5, "function_call": "auto",
    "functions": [{"name": "f"}], "image": {"a": 1}, "include": ["message.output_text.logprobs"],
    "inference_geo": "eu", "input": "other", "instructions": "Be short.", "logit_bias": {"5": 1}, "logprobs": True,
    "max_completion_tokens": 9, "max_output_tokens": 9, "max_tokens": 9, "max_tool_calls": 1,
    "mcp_servers": [{"type": "url", "name": "a", "url": "https://example.org"}], "messages": [USER, *DONE],
    "metadata": {"user_id": "u"}, "modalities": ["text"], "model": "gpt", "moderation": {"a": 1}, "n": 2,
    "output_config": {"format": SCHEMA}, "parallel_tool_calls": False, "prediction": {"type": "content"},
    "presence_penalty": 0.5, "previous_response_id": "resp_1", "prompt": "other", "prompt_cache_key": "k",
    "prompt_cache_options": {"a": 1}, "prompt_cache_retention": "24h", "reasoning": {"effort": "none"},
    "reasoning_effort": "none", "response_format": SCHEMA, "safety_identifier": "s", "seed": 3,
    "service_tier": "flex", "speed": "fast", "stop": ["i"], "stop_sequences": ["n"], "store": True, "stream": True,
    "stream_options": {"include_usage": True}, "suffix": "x", "system": "Be short.", "temperature": 0.5,
    "text": {"format": SCHEMA}, "thinking": {"type": "disabled"}, "thread": {"type": "create"},
    "tool_choice": "none", "tools": [FUNCTION], "top_logprobs": 2, "top_p": 0.5, "truncation": "auto", "user": "u",
    "user_profile_id": "u", "verbosity": "low", "web_search_options": {"a": 1}, "workspace_id": "w",
    "access_programs": ["p"],
}  # fmt: skip
BESIDE = {
    "parallel_tool_calls": "tools", "tool_choice": "tools", "max_tool_calls": "tools", "stream_options": "stream",
    f"{C} top_logprobs": "logprobs", f"{R} top_logprobs": "include",
}  # fmt: skip
CLAUDES = {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "none"}}
NOT_FOR_ALL = {"previous_response_id", "suffix", "best_of", "prompt"}  # one endpoint or one value has them
PARAMETERS = sorted({
    (PATHS[api], name) for apis in vendor_parameters.listed().values() for api, names in apis.items()
    for name in names.split()
})  # fmt: skip


@pytest.mark.parametrize(("path", "name"), PARAMETERS)
def test_each_parameter_is_honoured_refused_or_harmless(path: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = VALUES | (CLAUDES if M in path else {"logprobs": 1} if path == "/v1/completions" else {})
    beside = {one: values[one] for one in BESIDE.get(f"{path} {name}", BESIDE.get(name, "")).split()}
    body, value = {"model": MODEL, **REQUIRED[path], **beside}, values[name]
    without, given = (effect(path, one, monkeypatch) for one in (body, {**body, name: value}))
    if given[0] == 400:
        assert name in REFUSED or name in NOT_FOR_ALL
        error = json.loads(given[2])["error"]
        assert name in (error.get("param"), *error["message"].replace("'", " ").split()), error
        assert error.get("details") == ({"error_code": "thread_unsupported_request"} if name == "thread" else None)
    elif given == without:
        assert name in HARMLESS or (name == "output_config" and path == f"{M}/count_tokens")  # no part of the prompt
    else:
        assert given[0] == (404 if name == "model" else 200)


REQUIRED: dict[str, dict[str, Any]] = {
    C: {"messages": [USER]}, R: {"input": "?"}, M: {"messages": [USER], "max_tokens": 8},
    "/v1/completions": {"prompt": "?"}, f"{M}/count_tokens": {"messages": [USER]},
}  # fmt: skip


def effect(path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[Any], str]:
    """Return status, what the engine was asked and the answer, with ids and times that are always the same."""
    numbers = count()
    monkeypatch.setattr("secrets.token_hex", lambda size: f"{next(numbers):0{2 * size}x}")
    monkeypatch.setattr("time.time", lambda: 0.0)
    answer = App(engine := ScriptedEngine()).ask(path, body)
    return answer.status_code, engine.seen, answer.text


def test_the_list_of_parameters_is_that_of_the_installed_packages() -> None:
    for release, apis in vendor_parameters.installed().items():
        assert vendor_parameters.listed().get(release) == apis, "tests/support/vendor_parameters.py says how to add it"

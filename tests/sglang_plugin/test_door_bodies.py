"""Checks of request bodies with the request models of the installed SGLang; no engine is started."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from support.door_app import ANYTHING, CLOSED
from support.door_bodies import CHAT, CONTEXT, MESSAGE, PATHS, REFUSED, image, properties, sampling, schema, tool, tools
from support.pictures import noise, picture
from support.sglang_program import BOTH, found

from kimi_w4a8_eagle3.door import rules
from kimi_w4a8_eagle3.door.access import CHECKED
from kimi_w4a8_eagle3.door.answers import Refusal

PROGRAM = """
import json, sys
from kimi_w4a8_eagle3.door.answers import Refusal
from kimi_w4a8_eagle3.door.rules import RequestRules
from kimi_w4a8_eagle3.door.settings import DoorSettings
from kimi_w4a8_eagle3.sglang_plugin.http.door_models import request_models, sampling_model

def answer(rules, path, body):
    try:
        return [200, json.loads(rules.admit(path, {}, body.encode("latin-1")).body)]
    except Refusal as refusal:
        return [refusal.status, refusal.message]

models = request_models(), sampling_model()
usual = RequestRules(DoorSettings(), *models, %d)
opened = RequestRules(DoorSettings(stop_regex=True, values="moonshot"), *models, %d)
cases = json.load(open(%r))
print(json.dumps({
    "usual": [answer(usual, *case) for case in cases["usual"]],
    "opened": [answer(opened, *case) for case in cases["opened"]],
}))
"""

GENERATE = {"text": "x", "sampling_params": {"temperature": 0.0, "max_new_tokens": 4, "stop": ["a"]}, "stream": False}
ROUTED = {"logprobs": False, "stream": False, "no_stop_trim": False, "ignore_eos": False, "skip_special_tokens": True}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"url": {"type": "string"}}}}
TALK = {
    **CHAT,
    "messages": [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "see http://example.org/image.png"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": "auto",
    "stream_options": {"include_usage": True},
}
# A UUID as zod writes it, and a default that reads like a part of a structural tag.
HINT = {"properties": {"id": {"pattern": "^(" + "[0-9a-f]{4}-?" * 40 + ")$", "default": {"type": "plus"}}}}
LARGE = picture(noise(300, 300))  # of more characters than the text of a body may have
PICTURE = {"type": "base64", "media_type": "image/png", "data": LARGE.partition(",")[2]}
C, P, M, R, G = PATHS
# What clients send, and what of it the engine reads; None: all of it.
ACCEPTED: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "chat": ("/v1/chat/completions", CHAT, None),
    "numbers": ("/v1/chat/completions", {**CHAT, "temperature": 1, "top_p": 0.9, "logit_bias": {"5": -1}}, None),
    "tool call": ("/v1/chat/completions", TALK, None),
    "fields that no endpoint reads": (C,
     {**CHAT, "metadata": {"a": "b"}, "store": True, "prediction": None, "client_metadata": {"a": {"b": 1}}}, CHAT),
    "codex": ("/v1/responses", {"input": "x", "client_metadata": {"a": "b"}, "prompt_cache_key": "x"}, {"input": "x"}),
    "a schema that is not compiled": ("/v1/chat/completions", {**CHAT, **tools(HINT)}, None),
    "a schema that is not compiled, forced": (C, {**CHAT, **tools(HINT), "tool_choice": "required"}, None),
    "many optional properties": ("/v1/messages", {**MESSAGE, "tools": [tool(200, 4)]}, None),
    "a whole form": (P,
     {"prompt": "x", "rid": None, "bootstrap_host": None, "n": None, "lora_path": "", "return_hidden_states": False},
     {"prompt": "x"}),
    "null in sampling_params": ("/generate", sampling(n=None, temperature=0), sampling(temperature=0)),
    "a whole native form": (G,
     {**GENERATE, "return_hidden_states": False, "lora_path": None, "logprob_start_len": -1, "return_logprob": False},
     {**GENERATE, "logprob_start_len": -1, "return_logprob": False}),
    "batch": ("/v1/completions", {"prompt": ["a"] * 256, "n": 2}, None),
    "ids": ("/generate", {"input_ids": [[1, 2], [3]], "sampling_params": [{"n": 1}, {"n": 1}]}, None),
    "image": ("/v1/chat/completions", image({"url": LARGE}), None),
    "image of a message": (M,
     {**MESSAGE, "messages": [{"role": "user", "content": [{"type": "image", "source": PICTURE}]}]}, None),
    "template": (C, {**CHAT, "chat_template_kwargs": {"thinking": False}},
     {**CHAT, "chat_template_kwargs": {"thinking": False, "enable_thinking": False}}),
    "a tool that the server would run": (R, {"input": "x", "tools": [{"type": "mcp", "server_url": "http://x"}]},
     {"input": "x", "tools": []}),
    "effort": ("/v1/chat/completions", {**CHAT, "reasoning": {"effort": "high"}}, None),
    "schema": (C,
     schema({**properties(500), "required": [f"{i:04}" for i in range(480)], "additionalProperties": False}), None),
    "a length": ("/v1/chat/completions", schema({"type": "string", "maxLength": 2**31 - 1}), None),
    "pattern": ("/v1/completions", {"prompt": "x", "regex": "[0-9]{3}-[a-z]+"}, None),
    "pattern of an address": ("/v1/completions", {"prompt": "x", "regex": r"(?:\d{1,3}\.){3}[(\d{]{1,3}"}, None),
    "claude": (
        "/v1/messages",
        {
            **MESSAGE,
            "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
            "tools": [{"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}}}],
            "metadata": {"user_id": "u"},
            "stream": True,
        },
        None,
    ),
    "responses": (
        "/v1/responses",
        {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}],
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {"type": "function", "name": "f"},
            "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
            "instructions": "x",
            "metadata": {"a": "b"},
            "reasoning": {"effort": "max"},
            "store": False,
        },
        None,
    ),
    # As smg 1.13 passes them on, and sglang-router 0.3.2.
    "chat, routed": (C,
     {**CHAT, **ROUTED, "continue_final_message": False, "separate_reasoning": True, "return_hidden_states": False},
     {**CHAT, **ROUTED, "continue_final_message": False, "separate_reasoning": True}),
    "generate, routed": (G,
     {**GENERATE, "model": "m", "log_metrics": True, "background": False, "no_logs": False, "return_bytes": False},
     {**GENERATE, "log_metrics": True}),
    "responses, routed": (R,
     {"input": "x", "stream": None, "temperature": 1.0, "priority": 0, "top_k": -1, "min_p": 0.0},
     {"input": "x", "temperature": 1.0, "top_k": -1, "min_p": 0.0}),
    "tokenize": ("/v1/tokenize", {"model": "m", "messages": CHAT["messages"]}, None),
    "detokenize": ("/v1/detokenize", {"tokens": [1, 2]}, None),
    "logprobs of a prompt": (G,
     {"input_ids": [1] * 8000, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 8}, None),
}  # fmt: skip
# Where the operator opened stop_regex, and takes the values of Moonshot's API only.
OPENED: dict[str, tuple[str, dict[str, Any], int]] = {
    "stop pattern": ("/v1/chat/completions", {**CHAT, "stop_regex": "a+"}, 200),
    "stop pattern, native": ("/generate", sampling(stop_regex=["a+"]), 200),
    **{
        f"{name}={value}": ("/v1/chat/completions", {**CHAT, name: value}, status)
        for name, values, status in (
            ("temperature", (0.0, 0.6, 1, None), 200), ("temperature", (-0.1, 1.1, 2.0), 400),
            ("top_p", (0.95, None), 200), ("top_p", (0.8, 1), 400), ("n", (1,), 200), ("n", (2,), 400),
            ("presence_penalty", (0, 0.0), 200), ("presence_penalty", (0.5,), 400),
            ("frequency_penalty", (0,), 200), ("frequency_penalty", (0.5, -0.5), 400),
        )
        for value in values
    },
    "another endpoint": ("/v1/completions", {"model": "m", "prompt": "x", "top_p": 0.5}, 200),
}  # fmt: skip


def sent(body: Any) -> str:
    return body.decode("latin-1") if isinstance(body, bytes) else json.dumps(body)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], dict[str, Any]]:
    """The door's answer to every body of the tables, with the models of either release, in one process each."""
    path = tmp_path_factory.mktemp("bodies") / "cases.json"
    usual = [(case[0], sent(case[1])) for table in (REFUSED, ACCEPTED) for case in table.values()]
    opened = [(case[0], sent(case[1])) for case in OPENED.values()]
    path.write_text(json.dumps({"usual": usual, "opened": opened}))
    return lambda newest: found(PROGRAM % (CONTEXT, CONTEXT, str(path)), newest)


@BOTH
def test_bodies_that_the_engine_must_not_see(answers: Callable[[bool], dict[str, Any]], newest: bool) -> None:
    given = answers(newest)["usual"][: len(REFUSED)]
    wrong = {
        name: (status, said)
        for (name, (_, _, expected)), (status, said) in zip(REFUSED.items(), given, strict=True)
        if status not in (400, 413) or expected not in said
    }
    assert wrong == {}


@BOTH
def test_what_clients_send_reaches_the_engine(answers: Callable[[bool], dict[str, Any]], newest: bool) -> None:
    given = answers(newest)["usual"][len(REFUSED) :]
    wrong = {
        name: said
        for (name, (_, body, admitted)), (_, said) in zip(ACCEPTED.items(), given, strict=True)
        if said != (body if admitted is None else admitted)
    }
    assert wrong == {}


def test_what_the_operator_opened(answers: Callable[[bool], dict[str, Any]]) -> None:
    given = dict(zip(OPENED, answers(False)["opened"], strict=True))
    assert {name: status for name, (status, _) in given.items()} == {name: case[2] for name, case in OPENED.items()}
    assert given["n=2"][1] == "n must be 1 (KIMI_DOOR_VALUES=moonshot)"


def test_prompts_together_may_be_longer_than_one() -> None:
    small = rules.RequestRules(CLOSED, dict.fromkeys(CHECKED, ANYTHING), ANYTHING, context=100)

    def admit(**body: Any) -> None:
        small.admit("/generate", {}, json.dumps(body).encode())

    admit(text=["x" * 1500] * 2)
    admit(text="x" * 1500)
    for text in ("x" * 1601, ["x" * 1601, "x"]):
        with pytest.raises(Refusal, match="the prompt is longer than 100 tokens"):
            admit(text=text)
    admit(text="x", logprob_start_len=-1)
    with pytest.raises(Refusal, match="logprob_start_len must be a position"):
        admit(text="x", logprob_start_len=-2)


def test_a_list_of_prompts_is_a_batch_and_one_prompt_of_ids_is_not() -> None:
    assert all(rules._is_batch(body) for body in ({"text": ["a"]}, {"input_ids": [[1]]}))
    assert not any(rules._is_batch(body) for body in ({"text": "a"}, {"input_ids": [1]}, {"text": []}, {}))

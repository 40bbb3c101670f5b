"""Bodies in the words of other vendors, rewritten before they are checked."""

from __future__ import annotations

from typing import Any

import pytest

from kimi_w4a8_eagle3.door.access import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from kimi_w4a8_eagle3.door.dialects import translate

OFF, ON = {"thinking": False, "enable_thinking": False}, {"thinking": True, "enable_thinking": True}


def translated(path: str, **body: Any) -> tuple[dict[str, Any], list[str]]:
    dropped: list[str] = []
    translate(body, path, lambda name, where: dropped.append(f"{where} {name}"))
    return body, dropped


@pytest.mark.parametrize("path", [CHAT, RESPONSES, "/tokenize"])
@pytest.mark.parametrize(
    ("sent", "switches"),
    [
        ({"thinking": {"type": "disabled"}}, OFF),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, ON),
        ({"thinking": False}, OFF),
        ({"enable_thinking": False}, OFF),
        ({"chat_template_kwargs": {"enable_thinking": False}}, OFF),
        ({"chat_template_kwargs": {"thinking": True}, "thinking": {"type": "disabled"}}, ON),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, {"reasoning_effort": "low"}),
        ({"thinking": {}}, None),
        ({"thinking": 3}, None),
        ({}, None),
    ],
)
def test_every_switch_of_thinking_is_read(path: str, sent: dict[str, Any], switches: dict[str, Any] | None) -> None:
    body, _ = translated(path, **sent)
    assert body == ({} if switches is None else {"chat_template_kwargs": switches})


def test_other_endpoints_have_their_own_switch() -> None:
    assert translated(MESSAGES, enable_thinking=False)[0] == {"thinking": {"type": "disabled"}}
    assert translated(MESSAGES, enable_thinking=True)[0] == {}
    assert translated(MESSAGES, thinking={"type": "adaptive"})[0] == {"thinking": {"type": "adaptive"}}
    assert translated(COMPLETIONS, enable_thinking=False)[0] == {}


def test_a_body_that_is_wrong_is_left_to_the_checks() -> None:
    for wrong in ({"tools": "all"}, {"tools": [1, {"type": 2}]}, {"chat_template_kwargs": [1]}):
        assert translated(CHAT, **wrong) == (wrong, [])


def test_tools_that_the_server_would_have_to_run_are_dropped() -> None:
    function, custom = {"type": "function", "name": "search"}, {"type": "custom", "name": "apply_patch"}
    body, dropped = translated(RESPONSES, tools=[function, {"type": "web_search"}, custom])
    assert body == {"tools": [function, custom]} and dropped == [f"{RESPONSES} tools_web_search"]
    body, dropped = translated(
        CHAT, tools=[{"type": "builtin_function", "function": {"name": "$web_search"}}, function]
    )
    assert body == {"tools": [function]} and dropped == [f"{CHAT} tools_builtin_function"]


def test_items_of_one_answer_do_not_differ_in_phase() -> None:
    """SGLang gives a text its phase and, when the client sends it back, renders two answers for one."""
    said = [{"type": "message", "role": "assistant", "content": "x", "phase": "commentary"}, {"type": "function_call"}]
    body, _ = translated(RESPONSES, input=said)
    assert body["input"] == [{"type": "message", "role": "assistant", "content": "x"}, {"type": "function_call"}]
    assert translated(RESPONSES, input="phase")[0] == {"input": "phase"}


def test_a_namespace_has_functions_only_and_a_past_call_the_name_that_the_model_sees() -> None:
    function, custom = {"type": "function", "name": "wait"}, {"type": "custom", "name": "exec"}
    group = {"type": "namespace", "name": "agents", "tools": [function, custom, {"name": "send"}]}
    body, dropped = translated(RESPONSES, tools=[group, {"type": "namespace", "name": "empty"}])
    kept = {**group, "tools": [function, {"name": "send"}]}
    assert body["tools"] == [kept, {"type": "namespace", "name": "empty"}]
    assert dropped == [f"{RESPONSES} tools_custom"]
    for namespace, name in (("agents", "agents__wait"), ("mcp__notes__", "mcp__notes__wait")):
        past = {"type": "function_call", "namespace": namespace, "name": "wait", "arguments": "{}"}
        body, _ = translated(RESPONSES, input=[past])
        assert body["input"] == [{"type": "function_call", "name": name, "arguments": "{}"}]
    wrong = [{"type": "function_call", "namespace": 1, "name": "wait"}, {"type": "function_call", "namespace": "a"}]
    assert translated(RESPONSES, input=[dict(item) for item in wrong])[0]["input"] == wrong

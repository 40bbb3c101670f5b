"""Kimi's ids of calls in conversations with other ids, and the tools of calls with other ids."""

from __future__ import annotations

from typing import Any

import pytest

from kimi_w4a8_eagle3.gateway.calls import fitting_tool, named_tool
from kimi_w4a8_eagle3.gateway.conversation import Call, Message, number_calls


def asks(*calls: tuple[str, str]) -> Message:
    return Message("assistant", calls=[Call(call_id, name, "{}") for call_id, name in calls])


def result(call_id: str) -> Message:
    return Message("tool", call_id=call_id)


def numbered(*messages: Message) -> list[Any]:
    made = number_calls(list(messages))
    return [[call.id for call in message.calls] if message.calls else message.call_id for message in made]


def test_calls_are_numbered_over_the_whole_conversation_and_results_follow() -> None:
    first, second = asks(("call_x", "search"), ("toolu_y", "get")), asks(("z", "get"))
    assert numbered(first, result("toolu_y"), result("call_x"), second, result("z")) == [
        ["functions.search:0", "functions.get:1"], "functions.get:1", "functions.search:0", ["functions.get:2"],
        "functions.get:2",
    ]  # fmt: skip


def test_ids_of_kimi_stay() -> None:
    ids = numbered(asks(("functions.a:0", "a")), result("functions.a:0"), asks(("functions.b:1", "b")))
    assert ids == [["functions.a:0"], "functions.a:0", ["functions.b:1"]]


def test_ids_that_every_turn_or_every_call_uses_again() -> None:
    turn = (asks(("call_0", "a")), result("call_0"))
    assert numbered(asks(("call_0", "a")), *turn, asks(("", "a"), ("", "b")), result(""), result("")) == [
        ["functions.a:0"], ["functions.a:1"], "functions.a:1", ["functions.a:2", "functions.b:3"], "functions.a:2",
        "functions.b:3",
    ]  # fmt: skip


def test_two_parts_of_one_result_and_a_result_without_a_call() -> None:
    assert numbered(asks(("x", "a")), result("x"), result("x"), result("y"), result(""))[1:] == [
        "functions.a:0", "functions.a:0", "y", "",
    ]  # fmt: skip


DECLARED = {
    "search": {"properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}, "required": ["query"]},
    "get_weather": {"properties": {"city": {"type": "string"}}},
    "find.it": {"properties": {"query": {"type": ["string", "null"]}, "deep": True}, "required": ["query", "deep"]},
}


@pytest.mark.parametrize(
    ("call_id", "arguments", "name"),
    [
        ("functions.search:3", "{}", "search"),
        ("functions.unknown:3", "{}", "unknown"),
        ("search:3", "{}", "search"),
        ("search", "{}", "search"),
        ("functions.find.it:0", "{}", "find.it"),
        ("call_2", '{"query": "a", "limit": 3}', "search"),
        ("call_2", '{"query": "a", "deep": 1}', "find.it"),
        ("3", '{"city": "Rome"}', "get_weather"),
        ("", '{"city": "Rome"}', "get_weather"),
        ("call_2", '{"query": 1}', "call_2"),
        ("call_2", '{"town": "Rome"}', "call_2"),
        ("call_2", '{"query": "a', "call_2"),
        ("toolu_1:4", "[]", "toolu_1"),
    ],
)
def test_a_call_goes_to_its_tool(call_id: str, arguments: str, name: str) -> None:
    assert (named_tool(call_id, DECLARED) or fitting_tool(call_id, arguments, DECLARED)) == name


def test_the_only_tool_is_meant() -> None:
    assert fitting_tool("call_2", '{"query": "a', {"search": {}}) == "search"

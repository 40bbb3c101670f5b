"""Recorded requests of real agents, and tools of real MCP servers, pass the gateway; only the engine is a script."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

from support import recorded
from support.gateway_app import App, ScriptedEngine, renderer

from kimi_w4a8_eagle3.gateway.conversation import Tool
from kimi_w4a8_eagle3.gateway.errors import Refusal
from kimi_w4a8_eagle3.gateway.grammar import check_tools

ANSWER = "<|im_assistant|>assistant<|im_middle|>"
CONTEXT = 262144  # Kimi's: the built-in tokenizer makes more tokens than the one that the clients counted with


@cache
def answers() -> list[tuple[int, str, int]]:
    """Return status, end and number of the assistant's turns in the prompt, of each request."""
    found = []
    for row in recorded.rows("requests"):
        engine = ScriptedEngine()
        answer = App(engine, context=CONTEXT).ask(row["path"], {**row["body"], "model": "default"})
        prompt = renderer().decode(engine.seen[0]["input_ids"]) if engine.seen else ""
        found.append((answer.status_code, answer.text[-300:], prompt.count(ANSWER)))
    return found


def answers_of(body: dict[str, Any]) -> int:
    """The number of answers of the assistant in a body: its items between what others say are one."""
    said = [item.get("role") or ("tool" if item["type"].endswith("_output") else "assistant") for item in items(body)]
    return sum(role == "assistant" and before != "assistant" for before, role in zip(["", *said], said, strict=False))


def items(body: dict[str, Any]) -> list[dict[str, Any]]:
    given = body.get("messages") or body["input"]
    return given if isinstance(given, list) else []


def test_every_request_is_served() -> None:
    asked = recorded.rows("requests")
    refused = {
        (row["session"], row["path"]): said
        for row, (status, said, _) in zip(asked, answers(), strict=True)
        if status != 200 or '"error":{' in said
    }
    assert refused == {}
    assert len({row["session"] for row in asked}) >= 20
    assert all(count >= 3 for count in Counter(row["session"] for row in asked).values())


def test_an_answer_that_is_sent_back_is_one_answer() -> None:
    split = {
        (row["session"], number)
        for number, (row, (_, _, count)) in enumerate(zip(recorded.rows("requests"), answers(), strict=True))
        if count != answers_of(row["body"]) + 1
    }
    assert split == set()


def test_the_tools_of_every_mcp_server_are_declared() -> None:
    for row in recorded.rows("mcp_tools"):
        tools = [{"type": "function", "function": tool} for tool in functions(row["tools"])]
        body = {"model": "default", "messages": [{"role": "user", "content": "?"}], "tools": tools}
        answer = App(ScriptedEngine(), context=CONTEXT).ask("/v1/chat/completions", body)
        assert answer.status_code == 200, (row["server"], answer.text[:300])


def functions(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool["inputSchema"]}
        for tool in tools
    ]


def test_nearly_all_real_tools_can_be_strict() -> None:
    tools = [tool for row in recorded.rows("mcp_tools") for tool in functions(row["tools"])]
    strict = [enforceable(Tool(tool["name"], None, tool["parameters"], True)) for tool in tools]
    assert len(strict) >= 1000 and sum(strict) >= 0.95 * len(strict)


def enforceable(tool: Tool) -> bool:
    try:
        check_tools([tool])
    except Refusal:
        return False
    return True

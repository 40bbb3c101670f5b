"""The door accepts the tools of real MCP servers, of which agents send many lists together."""

from __future__ import annotations

from typing import Any

from support import recorded

from kimi_w4a8_eagle3.door.answers import Refusal
from kimi_w4a8_eagle3.door.schemas import check_tools

SERVERS = {row["server"]: row["tools"] for row in recorded.rows("mcp_tools") if row["tools"]}


def declared(tool: dict[str, Any], strict: bool) -> dict[str, Any]:
    function = {"name": tool["name"], "description": tool["description"], "parameters": tool["inputSchema"]}
    return {"type": "function", "function": {**function, "strict": strict}}


def accepted(tools: list[dict[str, Any]]) -> bool:
    try:
        check_tools([tools])
    except Refusal:
        return False
    return True


def test_real_tools_are_accepted_and_nearly_all_of_them_when_they_are_strict() -> None:
    lists = [[declared(tool, False) for tool in tools] for tools in SERVERS.values()]
    alone = [[tool] for tools in lists for tool in tools]
    assert len(lists) >= 20 and len(alone) >= 1000
    assert [tools for tools in (*lists, *alone) if not accepted(tools)] == []
    strict = [accepted([declared(tool, True)]) for tools in SERVERS.values() for tool in tools]
    assert sum(strict) >= 0.95 * len(strict)

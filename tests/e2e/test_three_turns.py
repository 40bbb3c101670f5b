"""Conversations on /v1/responses and /v1/messages: thinking and calls are sent back as they came, streamed or not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from support.said import MODEL, stock_client

from kimi_w4a8_eagle3.chat.calculator import NAME, calculate, declaration
from kimi_w4a8_eagle3.engine.process import EngineServer

pytestmark = pytest.mark.server

FUNCTION = declaration()["function"]
QUESTIONS = (
    ("Mia has 33 apples and buys 14 more. How many apples does Mia have now?", "47"),
    ("Tom has 12 coins and loses 5. How many coins does Tom have now?", "7"),
    ("Ann has 20 books and buys 22 more. How many books does Ann have now?", "42"),
)
_MOST_REQUESTS = 12


def test_responses_in_turns(eagle3: EngineServer) -> None:
    """With the stock SDK; the output of each answer is sent back whole, with its reasoning."""
    with stock_client(eagle3.base_url) as client:

        def ask(items: list[Any], stream: bool) -> list[Any]:
            request: dict[str, Any] = {"model": MODEL, "input": items, "tools": [{"type": "function", **FUNCTION}]}
            request |= {"temperature": 0, "max_output_tokens": 128, "store": False}
            if not stream:
                return client.responses.create(**request).output
            with client.responses.stream(**request) as running:
                return running.get_final_response().output

        def converse(stream: bool) -> list[Any]:
            items: list[Any] = []
            said: list[Any] = []
            for question, expected in QUESTIONS:
                items.append({"role": "user", "content": question})
                for _ in range(_MOST_REQUESTS):
                    output = ask(items, stream)
                    items += [item.model_dump(exclude_none=True) for item in output]
                    calls = [item for item in output if item.type == "function_call"]
                    said += [_words(item.model_dump()) for item in output]
                    if not calls:
                        break
                    for call in calls:
                        result = {"call_id": call.call_id, "output": calculate(call.arguments)}
                        items.append({"type": "function_call_output", **result})
                assert expected in str(said[-1])
            assert {"reasoning", "function_call", "message"} <= {item["type"] for item in items if "type" in item}
            return said

        assert converse(stream=True) == converse(stream=False)


def _words(item: dict[str, Any]) -> Any:
    """Return the content of an item: a call, or its text without the ids."""
    if item["type"] == "function_call":
        return [item["name"], json.loads(item["arguments"])]
    return [item["type"], "".join(part["text"] for part in item.get("content") or item.get("summary") or ())]


def test_messages_in_turns(eagle3: EngineServer) -> None:
    whole = _converse(lambda body: _messages(eagle3, body))
    streamed = _converse(lambda body: _streamed_messages(eagle3, body))
    assert streamed == whole


def _converse(ask: Callable[[dict[str, Any]], list[dict[str, Any]]]) -> list[Any]:
    tool = {"name": NAME, "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
    request = {"model": MODEL, "max_tokens": 2048, "tools": [tool], "temperature": 0.0}
    request["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    messages: list[dict[str, Any]] = []
    said: list[Any] = []
    for question, expected in QUESTIONS:
        messages.append({"role": "user", "content": question})
        for _ in range(_MOST_REQUESTS):
            content = ask({**request, "messages": messages})
            messages.append({"role": "assistant", "content": content})
            said += [
                {key: block[key] for key in ("thinking", "text", "name", "input") if key in block} for block in content
            ]
            calls = [block for block in content if block["type"] == "tool_use"]
            if not calls:
                break
            results = [{"tool_use_id": call["id"], "content": calculate(json.dumps(call["input"]))} for call in calls]
            messages.append({"role": "user", "content": [{"type": "tool_result", **result} for result in results]})
        assert expected in said[-1]["text"]
    assert {"thinking", "text", "name", "input"} == set().union(*said)
    return said


def _messages(server: EngineServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = httpx.post(f"{server.base_url}/v1/messages", json=body, timeout=200)
    assert answer.status_code == 200, answer.text
    content: list[dict[str, Any]] = answer.json()["content"]
    return content


def _streamed_messages(server: EngineServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Put the blocks together from the events, as Anthropic's own client does."""
    blocks: dict[int, dict[str, Any]] = {}
    with httpx.stream("POST", f"{server.base_url}/v1/messages", json={**body, "stream": True}, timeout=200) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            event: dict[str, Any] = json.loads(line[6:]) if line.startswith("data: {") else {"type": ""}
            assert event["type"] != "error", line
            if event["type"] == "content_block_start":
                blocks[event["index"]] = {**event["content_block"], "json": ""}
            elif event["type"] == "content_block_delta":
                for key, piece in event["delta"].items():
                    key = "json" if key == "partial_json" else key
                    if key != "type":
                        block = blocks[event["index"]]
                        block[key] = block.get(key, "") + piece
    for block in blocks.values():
        arguments = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments or "{}")
    return list(blocks.values())

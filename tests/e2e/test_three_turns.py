"""Thinking and calls, sent back on /v1/responses and /v1/messages as they came, and a call that is cut."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from support.said import MODEL, stock_client, streamed, whole

from kimi_w4a8_eagle3.base.calculator import NAME, calculate, declaration
from kimi_w4a8_eagle3.engine.fronted import FrontedEngine

pytestmark = pytest.mark.server

FUNCTION = declaration()["function"]
QUESTIONS = (
    ("Mia has 33 apples and buys 14 more. How many apples does Mia have now?", "47"),
    ("Tom has 12 coins and loses 5. How many coins does Tom have now?", "7"),
    ("Ann has 20 books and buys 22 more. How many books does Ann have now?", "42"),
)
_MOST_REQUESTS = 12
Item = dict[str, Any]


def test_responses_in_turns(eagle3: FrontedEngine) -> None:
    """With the stock SDK; the output of each answer is sent back whole, with its reasoning."""
    with stock_client(eagle3.base_url) as client:

        def ask(items: list[Any], stream: bool) -> list[Any]:
            request: Item = {"model": MODEL, "input": items, "tools": [{"type": "function", **FUNCTION}]}
            request |= {"temperature": 0, "max_output_tokens": 128, "store": False}
            if not stream:
                return client.responses.create(**request).output
            with client.responses.stream(**request) as running:
                return running.get_final_response().output

        def converse(stream: bool) -> list[object]:
            items: list[Item] = []
            said: list[object] = []
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


def test_messages_in_turns(eagle3: FrontedEngine) -> None:
    """The content of each answer is sent back whole, with its signed thinking, as Anthropic's SDKs do."""
    tool = {"name": NAME, "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
    turns: list[Item] = []
    for question, expected in QUESTIONS:
        turns.append({"role": "user", "content": question})
        for _ in range(_MOST_REQUESTS):
            body = {"model": MODEL, "messages": turns, "tools": [tool], "temperature": 0, "max_tokens": 128}
            answer = httpx.post(f"{eagle3.base_url}/v1/messages", json=body, timeout=600).raise_for_status().json()
            turns.append({"role": "assistant", "content": answer["content"]})
            calls = [block for block in answer["content"] if block["type"] == "tool_use"]
            if not calls:
                break
            results = [(call["id"], calculate(json.dumps(call["input"]))) for call in calls]
            blocks = [{"type": "tool_result", "tool_use_id": name, "content": result} for name, result in results]
            turns.append({"role": "user", "content": blocks})
        assert expected in answer["content"][-1]["text"]
    kinds = {block["type"] for turn in turns for block in turn["content"] if isinstance(block, dict)}
    assert kinds == {"thinking", "tool_use", "tool_result", "text"}


def _words(item: Item) -> object:
    """Return the content of an item: a call, or its text without the ids."""
    if item["type"] == "function_call":
        return [item["name"], json.loads(item["arguments"])]
    return [item["type"], "".join(part["text"] for part in item.get("content") or item.get("summary") or ())]


def test_a_call_that_is_cut_is_not_reported_as_complete(eagle3: FrontedEngine) -> None:
    turn = {"messages": [{"role": "user", "content": QUESTIONS[0][0]}], "tools": [declaration()], "max_tokens": 96}
    cut = {**turn, "stop": [" + 14"], "extra_body": {"thinking": {"type": "disabled"}}}
    with stock_client(eagle3.base_url) as client:
        got = [whole(client, cut), streamed(client, cut)]
        done = whole(client, {**turn, "extra_body": {"enable_thinking": False}})
    assert got[0] == got[1] and got[0].finish == "stop" and got[0].thought == ""
    assert got[0].calls == ((f"functions.{NAME}:0", NAME, '{"expression": "33'),)
    assert done.finish == "tool_calls" and done.calls[0][2] == '{"expression": "33 + 14"}' and done.thought == ""

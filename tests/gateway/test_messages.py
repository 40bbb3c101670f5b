"""/v1/messages: calls that are no object, signatures of thinking, stop sequences, formats."""

from __future__ import annotations

from typing import Any

import pytest
from support.gateway_app import MODEL, App, ScriptedEngine, events_of, renderer

from kimi_w4a8_eagle3.gateway.sealed import Seal

PATH = "/v1/messages"
TOOL = {"name": "search", "input_schema": {"type": "object", "properties": {"query": {"type": "string"}}}}
QUESTION = {"role": "user", "content": "?"}
BROKEN = ["[1, 2]", r'{"query": "\ud800"}', '{"query": 1e400}', "1e400", '{"query": NaN}', "7", '{"query": ']


def ask(words: str, *more: Any, status: int = 200, **named: Any) -> Any:
    body = {"model": MODEL, "messages": [QUESTION, *more], "max_tokens": 64, **named}
    answer = App(ScriptedEngine(words)).ask(PATH, body)
    assert answer.status_code == status, answer.text
    return events_of(answer.text) if named.get("stream") else answer.json()


def called(*arguments: str) -> str:
    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    calls = [
        f"<|tool_call_begin|>functions.search:{at}<|tool_call_argument_begin|>{one}<|tool_call_end|>"
        for at, one in enumerate(arguments)
    ]
    return "Hm.</think>" + begin + "".join(calls) + end


@pytest.mark.parametrize("arguments", BROKEN)
def test_arguments_that_are_no_object_become_text(arguments: str) -> None:
    answer = ask(called(arguments), tools=[TOOL])
    assert answer["stop_reason"] == "end_turn"
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
    assert answer["content"][1]["text"] == f"search {arguments.strip()}"


def test_null_means_no_arguments_and_a_broken_call_stands_beside_a_whole_one() -> None:
    answer = ask(called("null"), tools=[TOOL])
    assert (answer["stop_reason"], answer["content"][1]["input"]) == ("tool_use", {})
    deltas = [event["delta"] for event in ask(called("null"), tools=[TOOL], stream=True) if "delta" in event]
    assert {"type": "input_json_delta", "partial_json": "{}"} in deltas
    answer = ask(called('{"query": "b"}', "[1, 2]"), tools=[TOOL])
    assert answer["stop_reason"] == "tool_use"
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use"]


def test_thinking_has_a_signature_with_its_copy_that_any_other_may_replace() -> None:
    thought, said = ask("I think.</think>Done.")["content"]
    signature = Seal("seal").seal("I think.")
    assert thought == {"type": "thinking", "thinking": "I think.", "signature": signature}
    assert said == {"type": "text", "text": "Done."} and signature != Seal("other").seal("I think.")
    events = [event for event in ask("I think.</think>Done.", stream=True) if event.get("index") == 0]
    assert events[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert [event["type"] for event in events[-2:]] == ["content_block_delta", "content_block_stop"]
    assert events[-2]["delta"] == {"type": "signature_delta", "signature": signature}
    for given in (signature, "another", "", "größer", None):
        ask("</think>x", {"role": "assistant", "content": [{**thought, "signature": given}, said]}, QUESTION)
    assert [block["type"] for block in ask("</think>Done.")["content"]] == ["text"]


def test_thinking_that_a_client_sends_back_sealed_is_read() -> None:
    untold = {"type": "thinking", "thinking": "", "signature": Seal("seal").seal("I think.")}
    call = {"type": "tool_use", "id": "t", "name": "search", "input": {}}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "1"}]}
    engine = ScriptedEngine()
    turns = [QUESTION, {"role": "assistant", "content": [untold, call]}, result]
    App(engine).ask(PATH, {"model": MODEL, "max_tokens": 8, "messages": turns})
    assert "<think>I think.</think>" in renderer().decode(engine.seen[0]["input_ids"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_acts_after_thinking_and_is_named(stream: bool) -> None:
    answer = ask("33 + 14 = 47</think>It is = 47", stop_sequences=["="], stream=stream)
    ended = answer[-2]["delta"] if stream else answer
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", "=")
    if not stream:
        assert [block.get("thinking", block.get("text")) for block in answer["content"]] == ["33 + 14 = 47", "It is "]


@pytest.mark.parametrize("strict", [False, True])
def test_a_format_and_a_strict_tool_are_enforced(strict: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    engine = ScriptedEngine("</think>{}")
    named = {"tools": [{**TOOL, "strict": True}]} if strict else {
        "output_config": {"format": {"type": "json_schema", "schema": schema}}
    }  # fmt: skip
    App(engine).ask(PATH, {"model": MODEL, "max_tokens": 8, "messages": [QUESTION], **named})
    params = engine.seen[0]["sampling_params"]
    assert ("structural_tag" if strict else "json_schema") in params
    assert engine.seen[0]["require_reasoning"] is True  # the grammar waits for the end of thinking


def test_a_result_without_its_call_is_refused() -> None:
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "1"}]}
    assert "follows no message with that call" in ask("x", result, status=400)["error"]["message"]

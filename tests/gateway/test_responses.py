"""/v1/responses: cut calls, groups of tools, custom tools, and nothing stored; whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest
from support.gateway_app import MODEL, App, ScriptedEngine, events_of, renderer

PATH = "/v1/responses"
MEMBERS = [
    {"type": "function", "name": "search", "description": "Finds.", "parameters": {"type": "object"}, "strict": False},
    {"name": "wait"},
    {"type": "function", "name": ""},
]
TOOLS = [
    {"type": "function", "name": "search", "parameters": {"type": "object"}},
    {"type": "namespace", "name": "mcp__notes__", "tools": MEMBERS},
    {"type": "namespace", "name": "agents", "tools": MEMBERS},
    {"type": "custom", "name": "patch", "description": "Edits.", "format": {"type": "grammar", "definition": "x"}},
]
CUT = '{"query": "a'
LENGTH, STOP = {"reason": "max_output_tokens"}, {"reason": "stop"}


def written(name: str, arguments: str, end: str = "<|tool_call_end|><|tool_calls_section_end|>") -> str:
    begin = f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>"
    return f"I think.</think>I look.{begin}{arguments}{end}"


def asked(words: str, finish: str, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the whole answer and the events of a stream."""
    body = {"model": MODEL, "input": "?", "tools": TOOLS, **fields}
    engine = ScriptedEngine(words)
    engine.finish = {"type": finish}
    whole = App(engine).ask(PATH, body)
    assert whole.status_code == 200, whole.text
    engine.seen.clear()
    return whole.json(), events_of(App(engine).ask(PATH, {**body, "stream": True}).text)


def calls(items: list[dict[str, Any]]) -> list[list[Any]]:
    keys = ("namespace", "name", "arguments", "status")
    return [[item.get(key) for key in keys] for item in items if item["type"] == "function_call"]


@pytest.mark.parametrize(
    ("words", "finish", "fields", "status", "why", "arguments"),
    [
        (written("search", '{"query": 1}'), "stop", {}, "completed", None, '{"query": 1}'),
        (written("search", CUT, ""), "length", {}, "incomplete", LENGTH, CUT),
        (written("search", CUT + "b", ""), "stop", {"stop": ["b"]}, "incomplete", STOP, CUT),
        (written("search", CUT), "stop", {}, "completed", None, CUT),
        (written("search", "", ""), "length", {}, "incomplete", LENGTH, ""),
    ],
)
def test_a_cut_call_is_incomplete_whole_and_streamed(
    words: str, finish: str, fields: dict[str, Any], status: str, why: Any, arguments: str
) -> None:
    answer, events = asked(words, finish, **fields)
    last = events[-1]["response"]
    call = [None, "search", arguments, "completed" if arguments == '{"query": 1}' else "incomplete"]
    for one in (answer, last):
        assert [one["status"], one["incomplete_details"], calls(one["output"])] == [status, why, [call]]
    assert events[-1]["type"] == f"response.{status}"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert calls(done) == [call] and calls(added) == [[None, "search", "", "in_progress"]]
    deltas = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == arguments
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_the_model_sees_functions_of_groups_and_the_client_gets_both_names_back() -> None:
    engine = ScriptedEngine()
    App(engine).ask(PATH, {"model": MODEL, "input": "?", "tools": TOOLS})
    prompt = renderer().decode(engine.seen[0]["input_ids"])
    for name in ("search", "mcp__notes__search", "mcp__notes__wait", "agents__search", "agents__wait", "patch"):
        assert f'"name": "{name}"' in prompt
    answer, events = asked(written("mcp__notes__search", '{"query": 1}'), "stop")
    call = ["mcp__notes__", "search", '{"query": 1}', "completed"]
    assert calls(answer["output"]) == calls(events[-1]["response"]["output"]) == [call]
    assert [e["name"] for e in events if e["type"] == "response.function_call_arguments.done"] == ["search"]


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"name": "search", "namespace": "agents"}, "agents__search"),
        ({"name": "agents__search"}, "agents__search"),
        ({"function": {"name": "agents__wait"}}, "agents__wait"),
        ({"name": "search"}, "search"),
        ({"name": "wait"}, None),
        ({"name": "unknown"}, None),
        ({"name": "unknown", "namespace": "agents"}, None),
    ],
)
def test_a_member_is_forced_by_its_names(choice: dict[str, Any], name: str | None) -> None:
    engine = ScriptedEngine()
    body = {"model": MODEL, "input": "?", "tools": TOOLS, "tool_choice": {"type": "function", **choice}}
    answer = App(engine).ask(PATH, body)
    assert answer.status_code == (400 if name is None else 200), answer.text
    if name is not None:
        tag = engine.seen[0]["sampling_params"]["structural_tag"]
        assert f"functions.{name}:" in tag and tag.count("functions.") == 1


def test_a_custom_tool_gives_its_input_as_text() -> None:
    answer, events = asked(written("patch", '{"input": "*** Begin"}'), "stop")
    item = answer["output"][-1]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", "*** Begin")
    assert [e["input"] for e in events if e["type"] == "response.custom_tool_call_input.done"] == ["*** Begin"]
    again = [{"type": "custom_tool_call", "call_id": item["call_id"], "name": "patch", "input": item["input"]},
             {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"}]  # fmt: skip
    engine = ScriptedEngine()
    App(engine).ask(PATH, {"model": MODEL, "input": [{"role": "user", "content": "?"}, *again], "tools": TOOLS})
    assert '{"input": "*** Begin"}' in renderer().decode(engine.seen[0]["input_ids"])


@pytest.mark.parametrize("summary", [False, True])
def test_thinking_comes_back_sealed(summary: bool) -> None:
    answer, events = asked("I think.</think>Done.", "stop", **({"reasoning": {"summary": "auto"}} if summary else {}))
    thought = answer["output"][0]
    kind = "response.reasoning_summary_text.delta" if summary else "response.reasoning_text.delta"
    assert "".join(event["delta"] for event in events if event["type"] == kind) == "I think."
    assert thought["content"] == [{"type": "reasoning_text", "text": "I think."}]
    assert thought["summary"] == ([{"type": "summary_text", "text": "I think."}] if summary else [])
    engine = ScriptedEngine()
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": thought["encrypted_content"]}
    call = {"type": "function_call", "call_id": "c", "name": "search", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "1"}
    App(engine).ask(PATH, {"model": MODEL, "input": [{"role": "user", "content": "?"}, sealed, call, result]})
    assert "<think>I think.</think>" in renderer().decode(engine.seen[0]["input_ids"])


def test_an_answer_may_have_all_tokens_that_the_client_allows() -> None:
    def limit(tokens: int | None) -> int:
        engine = ScriptedEngine()
        more = {} if tokens is None else {"max_output_tokens": tokens}
        answer = App(engine, context=512).ask(PATH, {"model": MODEL, "input": "?", **more})
        if answer.status_code == 400:
            assert "exceed context limit" in answer.json()["error"]["message"]
            return -1
        prompt = len(engine.seen[0]["input_ids"])
        found: int = engine.seen[0]["sampling_params"]["max_new_tokens"]
        return found if tokens is not None else found + prompt

    assert [limit(tokens) for tokens in (1, 2, 100, 600, None)] == [1, 2, 100, -1, 512]

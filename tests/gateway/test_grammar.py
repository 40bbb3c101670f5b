"""Grammars of calls, as xgrammar compiles them: which answers may follow, and which never."""

from __future__ import annotations

import xgrammar

from kimi_w4a8_eagle3.gateway.conversation import Conversation, Grammar, Message, Sampling, Tool, ToolChoice
from kimi_w4a8_eagle3.gateway.grammar import grammar_of

BYTES = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)], xgrammar.VocabType.RAW, stop_token_ids=[0])
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [Tool("add", parameters=SCHEMA), Tool("stop", parameters={"type": "object"})]


def call(name: str, arguments: str = '{"a": 1}', index: str = "0") -> str:
    return f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def section(*calls: str) -> str:
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


def follows(text: str, **asked: object) -> bool:
    """Return True if a request lets this be its whole answer after thinking."""
    conversation = Conversation([Message("user", "?")], Sampling(), **{"tools": list(TOOLS), **asked})  # type: ignore
    grammar = grammar_of(conversation)
    assert grammar is not None and grammar.kind == "structural_tag"
    compiled = xgrammar.GrammarCompiler(BYTES, max_threads=1, cache_enabled=False).compile_structural_tag(grammar.text)
    matcher = xgrammar.GrammarMatcher(compiled)
    return bool(matcher.accept_string(text)) and (matcher.is_completed() or bool(matcher.accept_token(0)))


FORCED, NAMED = ToolChoice("required"), ToolChoice("required", "add")


def test_a_forced_answer_is_calls_alone_and_the_index_of_a_call_has_a_bound() -> None:
    assert follows(section(call("add"), call("stop", index="9999")), choice=FORCED)
    for wrong in ("47", section(), section(call("other")), section(call("add", index="10000")),
                  section(call("add", "7")), "It is" + section(call("add"))):  # fmt: skip
        assert not follows(wrong, choice=FORCED), wrong


def test_a_named_tool_is_called_once_and_parallel_calls_can_be_forbidden() -> None:
    assert follows(section(call("add")), choice=NAMED)
    assert not follows(section(call("add"), call("add")), choice=NAMED)
    assert not follows(section(call("stop")), choice=NAMED)
    assert not follows(section(call("add"), call("stop")), choice=FORCED, parallel=False)
    assert follows("Text.", parallel=False) and follows(section(call("add")), parallel=False)
    assert not follows(section(call("add"), call("stop")), parallel=False)


def test_a_strict_tool_is_held_to_its_schema_and_text_stays_free() -> None:
    strict = [Tool("add", parameters=SCHEMA, strict=True)]
    assert follows("Any text.", tools=strict) and follows("So:" + section(call("add")), tools=strict)
    assert not follows(section(call("add", '{"a": "x"}')), tools=strict)
    assert not follows(section(call("other", "{}")), tools=strict)


def test_with_a_format_an_answer_is_the_format_or_calls() -> None:
    format_ = Grammar("json_schema", '{"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]}')
    assert follows('{"b": null}', format=format_) and follows(section(call("add")), format=format_)
    assert not follows("Any text.", format=format_) and not follows('{"b": 1}', format=format_)

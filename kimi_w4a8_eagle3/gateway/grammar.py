"""Grammars of answers: forced and strict calls in Kimi's format, and schemas that xgrammar can enforce."""

from __future__ import annotations

from typing import Any

import orjson

from .conversation import Conversation, Grammar, Tool
from .enforceable import require_enforceable, schemas
from .errors import Refusal
from .reader import ARGUMENTS as ARGUMENTS_BEGIN
from .reader import BEGIN, END, SECTION, SECTION_END

Tag = dict[str, Any]
MAX_GRAMMAR_CHARACTERS = 2**18
MAX_SCHEMAS = 8192  # in the tools of a request
_TYPES = {"string", "number", "integer", "boolean", "object", "array", "null", "any"}
_INDEX = "[0-9]{1,4}"  # of a call; without a bound a model may write digits to its limit
_ANY_OBJECT = {"type": "object"}  # what Kimi's clients read as arguments


def grammar_of(conversation: Conversation) -> Grammar | None:
    """Return the grammar that the answer after thinking must follow, or None for a free answer."""
    tools, given = conversation.callable_tools, conversation.format
    forced = conversation.choice.mode == "required"
    held = tools and (forced or not conversation.parallel or any(tool.strict for tool in tools))
    if given is not None and tools:
        if forced:
            raise Refusal("a response format and a forced tool cannot both hold: send one of them", param="tool_choice")
        if given.kind != "json_schema":
            return given
        text = {"type": "json_schema", "json_schema": orjson.loads(given.text)}
        return _tagged({"type": "or", "elements": [text, _section(tools, conversation.parallel)]})
    if given is not None or not held:
        return given
    if forced:
        return _tagged(_section(tools, conversation.parallel and not conversation.choice.name))
    section = {"type": "tag", "begin": SECTION, "content": _calls(tools, conversation.parallel), "end": SECTION_END}
    return _tagged(
        {
            "type": "triggered_tags",
            "triggers": [SECTION],
            "tags": [section],
            "excludes": ["<think>", "</think>", BEGIN],
            "stop_after_first": not conversation.parallel,
        }
    )


def _tagged(format_: Tag) -> Grammar:
    return Grammar("structural_tag", orjson.dumps({"type": "structural_tag", "format": format_}).decode())


def _section(tools: list[Tool], parallel: bool) -> Tag:
    begin, end = ({"type": "const_string", "value": marker} for marker in (SECTION, SECTION_END))
    return {"type": "sequence", "elements": [begin, _calls(tools, parallel), end]}


def _calls(tools: list[Tool], parallel: bool) -> Tag:
    tags = [_call(tool) for tool in tools]
    return {
        "type": "tags_with_separator", "tags": tags, "separator": "", "at_least_one": True,
        "stop_after_first": not parallel,
    }  # fmt: skip


def _call(tool: Tool) -> Tag:
    schema = tool.parameters if tool.strict and tool.parameters is not None else _ANY_OBJECT
    content = [
        {"type": "regex", "pattern": _INDEX},
        {"type": "const_string", "value": ARGUMENTS_BEGIN},
        {"type": "json_schema", "json_schema": schema},
    ]
    begin = f"{BEGIN}functions.{tool.name}:"
    return {"type": "tag", "begin": begin, "content": {"type": "sequence", "elements": content}, "end": END}


def check_tools(tools: list[Tool]) -> None:
    """Raise Refusal for tools whose schemas are none, too many, or strict and not to be enforced."""
    objects = 0
    for number, tool in enumerate(tools):
        name = f"tools[{number}]"
        for place, schema in schemas(tool.parameters):
            objects += 1
            kinds = schema.get("type", [])
            for kind in [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else ():
                if str(kind) not in _TYPES:
                    raise Refusal(f"{name}: {kind!r:.60} is not valid as a type, at {place}", param="tools")
        if tool.strict:
            require_enforceable(tool.parameters, name)
    if objects > MAX_SCHEMAS:
        raise Refusal(f"tools hold {objects} schemas; at most {MAX_SCHEMAS} are read", param="tools")


def schema_grammar(schema: Any, name: str, strict: bool | None = True) -> Grammar:
    """Return the grammar of a JSON schema. strict False: parts that xgrammar does not enforce are allowed."""
    if not isinstance(schema, dict):
        raise Refusal(f"{name} is not a JSON schema", param=name)
    if strict is not False:
        require_enforceable(schema, name)
    return Grammar("json_schema", checked_text(orjson.dumps(schema).decode(), name))


def checked_text(text: str, name: str) -> str:
    """Return the text of a grammar; raise Refusal for one that is too long to be compiled."""
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        why = f"{name} has {len(text)} characters, and a grammar may have {MAX_GRAMMAR_CHARACTERS}"
        raise Refusal(why, param=name)
    return text

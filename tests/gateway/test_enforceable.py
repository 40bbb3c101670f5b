"""Schemas that xgrammar does not enforce are refused, with the place in the schema; all others pass."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import metadata, util
from random import Random
from typing import Any

import pytest
from support.structured_schemas import NOT_HELD, draw

from kimi_w4a8_eagle3.gateway import enforceable
from kimi_w4a8_eagle3.gateway.conversation import Tool
from kimi_w4a8_eagle3.gateway.enforceable import require_enforceable
from kimi_w4a8_eagle3.gateway.errors import Refusal
from kimi_w4a8_eagle3.gateway.formats import format_of, grammar_in
from kimi_w4a8_eagle3.gateway.grammar import MAX_SCHEMAS, check_tools
from kimi_w4a8_eagle3.gateway.requests import CompletionRequest


def wanted(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


def tool(schema: Any, strict: bool) -> Tool:
    return Tool("f", None, schema, strict)


@pytest.mark.parametrize("schema", NOT_HELD.values(), ids=NOT_HELD)
def test_unenforceable_schemas_are_refused_in_every_field(schema: dict[str, Any]) -> None:
    nested = {"type": "object", "properties": {"x": {"type": "array", "items": schema}}}
    with pytest.raises(Refusal, match=r"response_format: the schema at #/properties/x/items.* cannot be enforced"):
        format_of(wanted(nested), "response_format")
    with pytest.raises(Refusal, match=r"tools\[1\]: the schema at #"):
        check_tools([tool({}, True), tool(schema, True)])
    format_of(wanted(schema, strict=False), "response_format")
    check_tools([tool(schema, False)])


NULLABLE, MANY = {"type": ["number", "null"]}, [f"name{number}" for number in range(4000)]
TEXTS: list[dict[str, Any]] = [{"pattern": "a"}, {"format": "date"}, {"minLength": 1, "maxLength": 2}]
REFUSED: dict[str, list[Any]] = {
    # xgrammar 0.2.1 lets the model answer nothing, with status 200.
    **{f"at #/properties/a cannot be enforced: {key} is empty": [{"properties": {"a": {key: []}}}]
       for key in ("enum", "anyOf", "oneOf")},
    # xgrammar 0.2.1 takes `-` alone for a number that has only a minimum below zero, and no negative number.
    "a minimum below zero needs a maximum": [
        {**NULLABLE, low: -0.5} for low in ("minimum", "exclusiveMinimum") if enforceable._OLD],
    "propertyNames would be ignored": [
        {"type": "object", "propertyNames": names}
        for names in ({"type": "string", "pattern": "^a"}, {"type": "integer"}, {"enum": ["a"]}, False, {})],
    "pattern without a type would be": TEXTS[:1],
    "format without a type would be": TEXTS[1:2],
    "maxLength, minLength without a type would be": TEXTS[2:],
    "pattern, format and a length cannot be enforced together": [
        {"type": "string", **one, **other} for one in TEXTS for other in TEXTS if one is not other],
    **{f"at #/{key}/{at} cannot be enforced: if would be": [
        {key: [{"type": "string", "minLength": 1}] * at + [{"type": "object", "if": {}}]}]
       for key, at in (("anyOf", 1), ("oneOf", 1), ("allOf", 0), ("prefixItems", 1))},
    **{f"{key} beside \\$ref would be ignored": [{"$ref": "#/$defs/x", key: {}}]
       for key in ("pattern", "minimum", "properties", "items", "anyOf")},
    "refers only to itself": [{"$ref": "#"}],
    # A list is no description, and looking every name up in it would take the square of its length.
    "required names 'name0'": [{"type": "object", "required": MANY, "properties": MANY}],
}  # fmt: skip
HELD: list[Any] = [
    *({"type": "integer", low: -5, high: 5}
      for low in ("minimum", "exclusiveMinimum") for high in ("maximum", "exclusiveMaximum")),
    {"type": "integer", "minimum": 0}, {"type": "integer", "maximum": -1},
    *({"type": "object", "propertyNames": {"type": "string", **free}}  # any text is no constraint
      for free in ({}, {"description": "A name"}, {"title": "Name", "description": "A name"})),
    *({"type": "string", **one} for one in TEXTS),
    *({key: [{"type": "string", "minLength": 1}]} for key in ("anyOf", "oneOf", "allOf", "prefixItems")),
    *({**known, "pattern": "a", "minLength": 1} for known in ({"enum": ["a"]}, {"const": "a"})),
    # Values and names are no keywords.
    {"type": "object", "properties": {"not": {"type": "null"}, "if": {"enum": [{"not": 1}]}}},
    {"const": {"uniqueItems": True}, "default": {"multipleOf": 1}, "description": "allOf"},
    # The compiler refuses what is broken.
    {"required": 5}, {"required": [[]]}, {"allOf": {}}, {"properties": 1}, 5, None,
]  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_a_schema_is_refused_with_its_reason(why: str) -> None:
    for schema in REFUSED[why]:
        with pytest.raises(Refusal, match=why):
            require_enforceable(schema, "x")


@pytest.mark.parametrize("schema", HELD, ids=str)
def test_a_schema_that_is_held_passes(schema: Any) -> None:
    require_enforceable(schema, "x")


def test_every_drawn_schema_passes() -> None:
    for seed in range(300):
        require_enforceable(draw(Random(seed)), "x")


@pytest.mark.parametrize("schema", [{"type": "integer", "minimum": -5}, {"type": "integer", "multipleOf": 5}])
def test_what_a_newer_xgrammar_holds_is_refused_with_the_old_one_only(
    schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for old in (True, False):
        monkeypatch.setattr(enforceable, "_OLD", old)
        with pytest.raises(Refusal) if old else nullcontext():
            require_enforceable(schema, "x")


@pytest.mark.parametrize("old", ["0.2.1", "0.1.33", "0.2.6.post1"])
@pytest.mark.parametrize("new", ["0.2.7", "0.2.7.dev1", "0.3.0", "1.0"])
def test_the_installed_xgrammar_decides_what_is_held(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in (old, new):
        monkeypatch.setattr(metadata, "version", {"xgrammar": version}.__getitem__)
        spec = util.spec_from_file_location(enforceable.__name__, enforceable.__file__)
        assert spec and spec.loader
        spec.loader.exec_module(read_again := util.module_from_spec(spec))
        assert read_again._OLD is (version == old)


def test_parts_of_structural_tags_that_hold_grammars_are_closed() -> None:
    for kind in ("grammar", "ebnf", "lark", "repeat", "plus", "star"):
        tag = {"type": "structural_tag", "format": {"elements": [{"type": "const_string"}, {"type": kind}]}}
        with pytest.raises(Refusal, match=f"holds a {kind}, which is not for clients"):
            format_of(tag, "response_format")


def test_the_schemas_of_all_tools_are_counted_together() -> None:
    half = {"properties": {f"p{number}": {} for number in range(MAX_SCHEMAS // 2 - 1)}}
    check_tools([tool(half, False)] * 2)
    with pytest.raises(Refusal, match="tools hold 8193 schemas"):
        check_tools([*[tool(half, False)] * 2, tool({}, False)])


def test_a_schema_in_a_text_is_read_too_and_nests_no_deeper_than_a_body() -> None:
    deep = '{"type": "array", "items": ' * 60 + "{}" + "}" * 60
    ignored = '{"type": "integer", "multipleOf": 2}'
    for text, why in ((ignored, "multipleOf would be ignored"), (deep, "nests more than 48")):
        with pytest.raises(Refusal, match=why):
            grammar_in(CompletionRequest(prompt="", json_schema=text))
